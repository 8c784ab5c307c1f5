"""A request on its way through the simulated cluster."""

from __future__ import annotations

from prism.sim.prefix import Block


class Request:
    """Created at its arrival, dropped when it ends. Times are seconds of simulated time.

    generated: output tokens so far; kv_tokens: tokens that its KV holds, or would after its
    prefill; todo_tokens: of these still to be prefilled. join_step, end_step: in its engine's
    batch, where counts are brought up to date only when it leaves. The KV of the last output token
    is never needed, so the first token comes with the prefill and kv_tokens grows with each later.
    ready_s: from when on its engine may start it.
    hashes: ids of its prompt's whole blocks; prefix: blocks of its engine's cache that it uses;
    cached_tokens: of its prompt, not computed when it first started.
    executed_s, last_s: time spent in its steps and end of the last one, for step control only.
    """

    __slots__ = (
        "arrival_s",
        "cached_tokens",
        "deadline_s",
        "device",
        "end_step",
        "executed_s",
        "first_s",
        "generated",
        "hashes",
        "index",
        "join_step",
        "kv_tokens",
        "last_s",
        "model",
        "output_tokens",
        "prefix",
        "prompt_tokens",
        "ready_s",
        "retractions",
        "started_s",
        "todo_tokens",
    )

    def __init__(
        self,
        index: int,
        model: int,
        arrival_s: float,
        *,
        prompt_tokens: int,
        output_tokens: int,
        deadline_s: float,
        hashes: tuple[int, ...] = (),
    ) -> None:
        self.index = index
        self.model = model
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.deadline_s = deadline_s
        self.generated = 0
        self.kv_tokens = prompt_tokens
        self.todo_tokens = prompt_tokens
        self.started_s = -1.0
        self.ready_s = -1.0
        self.first_s = -1.0
        self.join_step = 0
        self.end_step = -1
        self.retractions = 0
        self.device = -1
        self.hashes = hashes
        self.prefix: list[Block] = []
        self.cached_tokens = 0
        self.executed_s = 0.0
        self.last_s = arrival_s

    @property
    def peak_tokens(self) -> int:
        """The most KV that it will ever hold."""
        return self.prompt_tokens + self.output_tokens - 1
