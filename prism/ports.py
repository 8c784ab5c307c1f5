"""What the control loops in `prism/scheduler` need from the world; live and simulated alike.

Implementations: `prism/agent`, `prism/cluster` (live), fakes in `prism/fakes.py` (shipped, users
test with them too). No port blocks: a call records an intent or reads a snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from prism.policies.data import Action, ClusterView


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds on a monotonic clock."""


class EngineView(msgspec.Struct, frozen=True):
    """One active model on this device, for admission. A Struct, since schedulers ask for them at
    every step.

    available_tokens counts mapped free tokens plus what the ledger would grant this engine now;
    pending_prefill_s is prefill work already submitted; ready_in_s is the remaining activation
    time (0 when active).

    shared_tokens is the device's common free room: what one engine takes of it, the others no
    longer have. It is taken in quanta of quantum_tokens, each token of token_bytes; limit_tokens is
    the most that this engine's own limit lets it take (None: there is no limit). own_tokens, the
    rest of available_tokens, is free for this engine alone. guaranteed_tokens is the part of
    available_tokens that no other engine could ever have: what its running requests leave of its
    minimum.
    """

    model: str
    available_tokens: int
    running: int
    max_running: int
    block_tokens: int
    prefill_tokens_per_s: float
    pending_prefill_s: float = 0.0
    ready_in_s: float = 0.0
    shared_tokens: int = 0
    token_bytes: int = 1
    quantum_tokens: int = 1
    guaranteed_tokens: int = 0
    limit_tokens: int | None = None

    @property
    def own_tokens(self) -> int:
        shared, limit = self.shared_tokens, self.limit_tokens
        return self.available_tokens - (shared if limit is None else min(shared, limit))


class EnginePort(Protocol):
    def views(self) -> Sequence[EngineView]:
        """Engines that serve or activate a model on this device."""

    def dispatch(self, model: str, request_ids: Sequence[str]) -> None:
        """Hand requests to the model's engine, in this order."""

    def ask_memory(self, model: str, tokens: int) -> None:
        """The first waiting request of `model` lacks `tokens` of KV: ask others to trim."""


class ClusterPort(Protocol):
    def view(self) -> ClusterView:
        """One coherent observation of the cluster."""

    def apply(self, action: Action) -> None:
        """Start an action; its outcome shows in a later view."""
