"""One engine under a closed loop of clients: what published benchmarks measure.

It has one model, one GPU group and equal requests, so that measured (TTFT, TPOT) can be compared
with a cost model without a cluster around it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from prism_sim.costs.model import CostModel, PromptChunk


@dataclass(frozen=True)
class ClosedLoop:
    """`concurrency` clients. Each sends its next request when it has its answer, until `requests`
    were sent."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    requests: int
    batch_max: int
    """Requests that fit in KV memory."""
    mixed: bool
    """Decodes go on while prompts are computed (TensorRT-LLM, vLLM). Otherwise prompts go first
    (SGLang's default)."""
    step_tokens: int = 8192
    spread_s: float = 0.0
    """The clients' first requests are spread evenly over this time."""


@dataclass(frozen=True)
class LoopLatency:
    """Means over all requests."""

    ttft_s: float
    tpot_s: float
    """After the first token."""


def run_closed_loop(cost: CostModel, load: ClosedLoop) -> LoopLatency:
    """Serve first come, first served until all requests are done."""
    clients = min(load.concurrency, load.requests)
    first_s = deque(load.spread_s * number / clients for number in range(clients))
    engine = _Engine(cost, load, coming=first_s, sent=clients)
    while engine.coming or engine.waiting or engine.running:
        engine.receive()
        if engine.waiting and (engine.prompt_left or len(engine.running) < load.batch_max):
            engine.prefill()
        else:
            engine.decode()
    decoded = max(1, load.output_tokens - 1)
    return LoopLatency(engine.ttft_s / load.requests, engine.decode_s / load.requests / decoded)


@dataclass
class _Engine:
    """First come, first served, in steps."""

    cost: CostModel
    load: ClosedLoop
    coming: deque[float]
    """Arrivals."""
    sent: int
    waiting: deque[float] = field(default_factory=deque)
    """Arrivals; the head's prompt is being computed in chunks."""
    running: deque[tuple[int, float]] = field(default_factory=deque)
    """(Decode step at which it ends, time of its first token), in order of both, since requests
    are equal."""
    now_s: float = 0.0
    step: int = 0
    context_tokens: int = 0
    prompt_left: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0

    def receive(self) -> None:
        """Take the requests that have arrived. An idle engine waits for the next."""
        if not self.running and not self.waiting:
            self.now_s = max(self.now_s, self.coming[0])
        while self.coming and self.coming[0] <= self.now_s:
            self.waiting.append(self.coming.popleft())

    def prefill(self) -> None:
        """One step with as many prompt tokens as fit."""
        batch = len(self.running) if self.load.mixed else 0
        chunks, begun = self._chunks(max(1, self.load.step_tokens - batch))
        self.now_s += self.cost.step_s(chunks, batch, self.context_tokens if batch else 0)
        if batch:
            self._advance(1)
        for _ in range(begun):
            self._first_token()

    def decode(self) -> None:
        """All steps until the next request ends or arrives."""
        steps = self.running[0][0] - self.step
        batch, context = len(self.running), self.context_tokens
        if self.coming:
            left_s = self.coming[0] - self.now_s
            steps = min(steps, 1 + self.cost.decode_steps(batch, context, left_s, steps))
        self.now_s += self.cost.decode_run_s(batch, context, steps)
        self._advance(steps)

    def _chunks(self, budget: int) -> tuple[list[PromptChunk], int]:
        """The chunks of the next step, and how many prompts end with it."""
        chunks: list[PromptChunk] = []
        done = 0
        room = self.load.batch_max - len(self.running)
        while budget and done < min(room, len(self.waiting)):
            left = self.prompt_left or self.load.input_tokens
            tokens = min(left, budget)
            chunks.append(PromptChunk(tokens, self.load.input_tokens - left))
            budget -= tokens
            self.prompt_left = left - tokens
            done += not self.prompt_left
        return chunks, done

    def _first_token(self) -> None:
        self.ttft_s += self.now_s - self.waiting.popleft()
        self.running.append((self.step + self.load.output_tokens - 1, self.now_s))
        self.context_tokens += self.load.input_tokens
        self._end_finished()

    def _advance(self, steps: int) -> None:
        self.step += steps
        self.context_tokens += steps * len(self.running)
        self._end_finished()

    def _end_finished(self) -> None:
        while self.running and self.running[0][0] <= self.step:
            _, first_s = self.running.popleft()
            self.decode_s += self.now_s - first_s
            self.context_tokens -= self.load.input_tokens + self.load.output_tokens - 1
            if self.sent < self.load.requests:
                self.sent += 1
                self.coming.append(self.now_s)
