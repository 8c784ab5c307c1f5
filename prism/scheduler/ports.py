"""Interfaces through which the control loops in `prism/scheduler` observe and act.

Implementations: `prism/cluster` (live), `prism_sim`, and the fakes in `fakes.py` for tests. No port
blocks: a call records an intent or reads a snapshot.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from prism.policies.data import Action, ClusterView


class Clock(Protocol):
    def now_s(self) -> float:
        """Returns seconds on a monotonic clock."""


class EngineView(msgspec.Struct, frozen=True):
    """Engine that serves or activates a model on this device, as admission sees it.

    A Struct, because one is built per engine and step.
    """

    model: str
    available_tokens: int  # free mapped tokens, and those that the ledger would grant now
    running: int  # number of requests
    max_running: int
    block_tokens: int
    prefill_tokens_per_s: float
    pending_prefill_s: float = 0.0  # prefill work of requests already submitted
    ready_in_s: float = 0.0  # rest of the activation; 0 when active
    # Tokens that fit into the device's free memory, which all its engines share.
    shared_tokens: int = 0
    token_bytes: int = 1
    quantum_tokens: int = 1  # granularity in which an engine takes shared memory
    # Part of available_tokens that no other engine can take: the unused rest of its minimum.
    guaranteed_tokens: int = 0
    limit_tokens: int | None = None  # shared tokens that its own limit allows; None: unlimited
    on_trial: bool = False  # a suspect runs there (see `Waiting`): nothing else may start

    @property
    def own_tokens(self) -> int:
        """Part of available_tokens that is free for this engine alone."""
        shared, limit = self.shared_tokens, self.limit_tokens
        return self.available_tokens - (shared if limit is None else min(shared, limit))


class ClusterPort(Protocol):
    def view(self) -> ClusterView:
        """Returns a consistent snapshot of the cluster."""

    def apply(self, action: Action) -> None:
        """Starts an action. Its outcome shows in a later view."""
