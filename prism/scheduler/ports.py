"""Interfaces through which the control loops in `prism/scheduler` observe and act.

Implementations: `prism/cluster` (live), `prism_sim`, and the fakes in `fakes.py` for tests. No port
blocks: a call records an intent or reads a snapshot.
"""

from __future__ import annotations

from typing import Protocol

from prism.policies.data import Action, ClusterView


class Clock(Protocol):
    def now_s(self) -> float:
        """Returns seconds on a monotonic clock."""


class ClusterPort(Protocol):
    def view(self) -> ClusterView:
        """Returns a consistent snapshot of the cluster."""

    def apply(self, action: Action) -> None:
        """Starts an action. Its outcome shows in a later view."""
