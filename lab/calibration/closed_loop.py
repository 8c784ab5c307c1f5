"""One engine under a closed loop of clients, as published benchmarks measure it.

The engine has one model, one GPU group and equal requests, so that measured (TTFT, TPOT) can be
compared with a cost model without simulating a cluster.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from prism_sim.costs.model import CostModel, PromptChunk


@dataclass(frozen=True)
class ClosedLoop:
    """Load of a closed loop. Each client sends its next request when the last one is finished."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    """Number of clients."""
    requests: int
    """Number of requests of all clients together."""
    batch_max: int
    """Number of requests that fit in KV memory."""
    mixed: bool
    """True if steps mix prompts with decodes (TensorRT-LLM, vLLM), False if prompts go first
    (SGLang's default)."""
    step_tokens: int = 8192
    spread_s: float = 0.0
    """Time over which the clients' first requests are spread evenly."""


@dataclass(frozen=True)
class LoopLatency:
    """Mean latencies of all requests."""

    ttft_s: float
    tpot_s: float
    """Time per output token after the first."""


def run_closed_loop(cost: CostModel, load: ClosedLoop) -> LoopLatency:
    """Serves the load, first come first served, and returns its latencies."""
    clients = min(load.concurrency, load.requests)
    first_s = deque(load.spread_s * number / clients for number in range(clients))
    engine = _Engine(cost, load, arrivals=first_s, sent=clients)
    while engine.arrivals or engine.waiting or engine.running:
        engine.receive()
        if engine.waiting and (engine.prompt_left or len(engine.running) < load.batch_max):
            engine.prefill()
        else:
            engine.decode()
    decoded = max(1, load.output_tokens - 1)
    return LoopLatency(engine.ttft_s / load.requests, engine.decode_s / load.requests / decoded)


@dataclass
class _Engine:
    """State of the engine."""

    cost: CostModel
    load: ClosedLoop
    arrivals: deque[float]
    """Times at which requests will arrive."""
    sent: int
    """Number of requests sent so far."""
    waiting: deque[float] = field(default_factory=deque)
    """Arrival times of waiting requests. The first one's prompt is computed in chunks."""
    running: deque[tuple[int, float]] = field(default_factory=deque)
    """(Decode step at which a request ends, time of its first token), ordered by both, since all
    requests are equal."""
    now_s: float = 0.0
    step: int = 0
    """Number of decode steps so far."""
    context_tokens: int = 0
    prompt_left: int = 0
    """Prompt tokens of the first waiting request that are left; 0 before its first chunk."""
    ttft_s: float = 0.0
    """Sum over the requests."""
    decode_s: float = 0.0
    """Sum over the requests of the time after the first token."""

    def receive(self) -> None:
        """Queues the requests that have arrived. An idle engine waits for the next one."""
        if not self.running and not self.waiting:
            self.now_s = max(self.now_s, self.arrivals[0])
        while self.arrivals and self.arrivals[0] <= self.now_s:
            self.waiting.append(self.arrivals.popleft())

    def prefill(self) -> None:
        """Runs one step with as many prompt tokens as fit."""
        batch = len(self.running) if self.load.mixed else 0
        chunks, begun = self._chunks(max(1, self.load.step_tokens - batch))
        self.now_s += self.cost.step_s(chunks, batch, self.context_tokens if batch else 0)
        if batch:
            self._advance(1)
        for _ in range(begun):
            self._first_token()

    def decode(self) -> None:
        """Runs decode steps until the next request ends or arrives."""
        steps = self.running[0][0] - self.step
        batch, context = len(self.running), self.context_tokens
        if self.arrivals:
            left_s = self.arrivals[0] - self.now_s
            steps = min(steps, 1 + self.cost.decode_steps(batch, context, left_s, steps))
        self.now_s += self.cost.decode_run_s(batch, context, steps)
        self._advance(steps)

    def _chunks(self, budget: int) -> tuple[list[PromptChunk], int]:
        """Returns the chunks of the next step and the number of prompts that it completes."""
        chunks: list[PromptChunk] = []
        done = 0
        slots = self.load.batch_max - len(self.running)
        while budget and done < min(slots, len(self.waiting)):
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
                self.arrivals.append(self.now_s)
