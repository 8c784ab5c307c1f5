"""What the control loops in `prism/scheduler` need from the world; live and simulated alike.

Implementations: `prism/cluster` (live), `prism/sim`, and the fakes in `fakes.py` for tests, yours
as well. No port blocks: a call records an intent or reads a snapshot.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from prism.policies.data import Action, ClusterView


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds on a monotonic clock."""


class EngineView(msgspec.Struct, frozen=True):
    """One active model on this device, for admission. A Struct, since schedulers ask for them at
    every step."""

    model: str
    available_tokens: int  # mapped free tokens, and what the ledger would grant this engine now
    running: int
    max_running: int
    block_tokens: int
    prefill_tokens_per_s: float
    pending_prefill_s: float = 0.0  # prefill work that was submitted already
    ready_in_s: float = 0.0  # the rest of the activation; 0 when active
    # The device's common free room: what one engine takes of it, the others no longer have. It is
    # taken in quanta of quantum_tokens, each token of token_bytes. own_tokens, the rest of
    # available_tokens, is free for this engine alone.
    shared_tokens: int = 0
    token_bytes: int = 1
    quantum_tokens: int = 1
    # The part of available_tokens that no other engine could ever have: what this engine's
    # requests leave of its minimum.
    guaranteed_tokens: int = 0
    limit_tokens: int | None = None  # the most that its own limit lets it take; None: no limit
    on_trial: bool = False  # a suspect runs there (see `Waiting`): nothing else starts

    @property
    def own_tokens(self) -> int:
        shared, limit = self.shared_tokens, self.limit_tokens
        return self.available_tokens - (shared if limit is None else min(shared, limit))


class ClusterPort(Protocol):
    def view(self) -> ClusterView:
        """One coherent observation of the cluster."""

    def apply(self, action: Action) -> None:
        """Start an action; its outcome shows in a later view."""
