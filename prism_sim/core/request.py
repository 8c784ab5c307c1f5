"""State of a simulated request, and the callbacks of its engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from prism_sim.core.prefix import Block


class SimRequest(msgspec.Struct, eq=False):
    """Request from its arrival to its end, in seconds of simulated time.

    A Struct because a simulation creates many. The first output token comes from the prefill, and
    kv_tokens grows with each later token: the KV of the last token is never needed.
    """

    index: int
    model: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    deadline_s: float
    # Time at which it last entered the queue.
    queued_s: float = -1.0
    priority: int = 0
    # Ids of the whole blocks of its prompt.
    hashes: tuple[int, ...] = ()
    # Output tokens so far.
    generated: int = 0
    # Tokens in its KV, including those that its prefill has yet to compute.
    kv_tokens: int = 0
    # Tokens of kv_tokens that are still to be prefilled.
    todo_tokens: int = 0
    started_s: float = -1.0
    # Earliest time at which its engine may start it.
    ready_s: float = -1.0
    first_s: float = -1.0
    # Steps of its engine's batch. The batch updates the counts only when the request leaves.
    join_step: int = 0
    end_step: int = -1
    retractions: int = 0
    device: int = -1
    # Blocks of its engine's prefix cache that it uses.
    prefix: list[Block] = []
    # Prompt tokens that were cached when it first started.
    cached_tokens: int = 0
    # Time spent in its steps; maintained for step control only.
    executed_s: float = 0.0
    # End of its last step; maintained for step control only.
    last_s: float = 0.0

    def __post_init__(self) -> None:
        self.kv_tokens = self.todo_tokens = self.prompt_tokens
        self.last_s = self.queued_s = self.arrival_s

    def requeue(self, now_s: float, slo_tpot_s: float) -> None:
        """Enters the queue again in the middle of its output. The next token is due within the TPOT
        SLO."""
        self.queued_s, self.deadline_s = now_s, now_s + slo_tpot_s

    def forget_kv(self) -> None:
        """Marks all tokens as not computed. Counts a retraction if some were."""
        self.retractions += self.todo_tokens < self.kv_tokens
        self.kv_tokens = self.todo_tokens = self.prompt_tokens + self.generated


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks of an engine."""

    ended: Callable[[SimRequest], None]
    retracted: Callable[[SimRequest], None]
    # Memory or a slot became free. Called before the engine's next step.
    freed: Callable[[], None]
