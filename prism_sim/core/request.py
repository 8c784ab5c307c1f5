"""A request on its way through the simulated cluster, and the callbacks of its engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from prism_sim.core.prefix import Block


class SimRequest(msgspec.Struct, eq=False):
    """Created at its arrival (many are: a Struct), dropped when it ends. Times are seconds of
    simulated time. The KV of the last output token is never needed: the first token comes with the
    prefill, and kv_tokens grows with each later one."""

    index: int
    model: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    deadline_s: float
    # When it came to the queue; of one that goes on, last.
    queued_s: float = -1.0
    priority: int = 0
    # Ids of its prompt's whole blocks.
    hashes: tuple[int, ...] = ()
    # Output tokens so far.
    generated: int = 0
    # Tokens that its KV holds, or would after its prefill; of these todo_tokens are still to be
    # prefilled.
    kv_tokens: int = 0
    todo_tokens: int = 0
    started_s: float = -1.0
    # From when on its engine may start it.
    ready_s: float = -1.0
    first_s: float = -1.0
    # In its engine's batch, which brings counts up to date only when the request leaves.
    join_step: int = 0
    end_step: int = -1
    retractions: int = 0
    device: int = -1
    # Blocks of its engine's cache that it uses.
    prefix: list[Block] = []
    # Of its prompt, not computed when it first started.
    cached_tokens: int = 0
    # Time spent in its steps, and the end of the last one: for step control only.
    executed_s: float = 0.0
    last_s: float = 0.0

    def __post_init__(self) -> None:
        self.kv_tokens = self.todo_tokens = self.prompt_tokens
        self.last_s = self.queued_s = self.arrival_s

    def goes_on(self, now_s: float, slo_tpot_s: float) -> None:
        """It waits again in the middle of its output: its next token is due within the TPOT SLO."""
        self.queued_s, self.deadline_s = now_s, now_s + slo_tpot_s

    def forget_kv(self) -> None:
        """What was computed of it, if anything was, is to be computed again."""
        self.retractions += self.todo_tokens < self.kv_tokens
        self.kv_tokens = self.todo_tokens = self.prompt_tokens + self.generated


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks of an engine. freed: memory or a slot became free, before its next step."""

    ended: Callable[[SimRequest], None]
    retracted: Callable[[SimRequest], None]
    freed: Callable[[], None]
