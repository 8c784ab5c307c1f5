"""A request on its way through the simulated cluster, and who is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from prism.sim.prefix import Block


class Request(msgspec.Struct, eq=False):
    """Created at its arrival (many are: a Struct), dropped when it ends. Times are seconds of
    simulated time.

    generated: output tokens so far; kv_tokens: tokens that its KV holds, or would after its
    prefill; todo_tokens: of these still to be prefilled. join_step, end_step: in its engine's
    batch, where counts are brought up to date only when it leaves. The KV of the last output token
    is never needed, so the first token comes with the prefill and kv_tokens grows with each later.
    ready_s: from when on its engine may start it.
    hashes: ids of its prompt's whole blocks; prefix: blocks of its engine's cache that it uses;
    cached_tokens: of its prompt, not computed when it first started.
    executed_s, last_s: time spent in its steps and end of the last one, for step control only.
    """

    index: int
    model: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    deadline_s: float
    hashes: tuple[int, ...] = ()
    generated: int = 0
    kv_tokens: int = 0
    todo_tokens: int = 0
    started_s: float = -1.0
    ready_s: float = -1.0
    first_s: float = -1.0
    join_step: int = 0
    end_step: int = -1
    retractions: int = 0
    device: int = -1
    prefix: list[Block] = []
    cached_tokens: int = 0
    executed_s: float = 0.0
    last_s: float = 0.0

    def __post_init__(self) -> None:
        self.kv_tokens = self.todo_tokens = self.prompt_tokens
        self.last_s = self.arrival_s

    def forget_kv(self) -> None:
        """What was computed of it, if anything was, is to be computed again."""
        self.retractions += self.todo_tokens < self.kv_tokens
        self.kv_tokens = self.todo_tokens = self.prompt_tokens + self.generated

    @property
    def peak_tokens(self) -> int:
        """The most KV that it will ever hold."""
        return self.prompt_tokens + self.output_tokens - 1


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told what. freed: memory or a slot became free, before the engine's next step."""

    ended: Callable[[Request], None]
    retracted: Callable[[Request], None]
    freed: Callable[[], None]
