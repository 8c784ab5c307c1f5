"""A device in plain numbers that carries out plans; its engines share its free bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prism.policies.data import EngineView, Waiting
from prism.scheduler.local_scheduler import LocalScheduler


def blocks(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens) * block_tokens


@dataclass
class Engine:
    token_bytes: int = 1
    quantum_tokens: int = 8
    block_tokens: int = 2
    max_running: int = 4
    prefill_tokens_per_s: float = 100.0
    ready_in_s: float = 0.0
    pending_prefill_s: float = 0.0
    mapped_tokens: int = 0
    running: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    @property
    def used_tokens(self) -> int:
        return sum(blocks(tokens, self.block_tokens) for tokens in self.running.values())

    @property
    def quantum_bytes(self) -> int:
        return self.quantum_tokens * self.token_bytes


class Device:
    """Device that checks at each dispatch that slots and memory are available."""

    def __init__(self, free_bytes: int, engines: dict[str, Engine]) -> None:
        self.capacity_bytes = free_bytes
        self.engines = engines
        self.requests: dict[str, Waiting] = {}
        self.dispatched: list[str] = []
        self.asked: list[tuple[str, int]] = []

    @property
    def free_bytes(self) -> int:
        mapped = sum(e.mapped_tokens * e.token_bytes for e in self.engines.values())
        return self.capacity_bytes - mapped

    def views(self) -> Sequence[EngineView]:
        return [self._view(model, engine) for model, engine in self.engines.items()]

    def _view(self, model: str, engine: Engine) -> EngineView:
        shared = self.free_bytes // engine.quantum_bytes * engine.quantum_tokens
        return EngineView(
            model=model,
            available_tokens=engine.mapped_tokens - engine.used_tokens + shared,
            running=len(engine.running),
            max_running=engine.max_running,
            block_tokens=engine.block_tokens,
            prefill_tokens_per_s=engine.prefill_tokens_per_s,
            pending_prefill_s=engine.pending_prefill_s,
            ready_in_s=engine.ready_in_s,
            shared_tokens=shared,
            token_bytes=engine.token_bytes,
            quantum_tokens=engine.quantum_tokens,
        )

    def step(self, scheduler: LocalScheduler, now_s: float) -> list[str]:
        """Carries out the scheduler's plan; returns the ids that it starts."""
        plan = scheduler.step(now_s, self.views())
        for model, request_ids in plan.starts.items():
            self.dispatch(model, request_ids)
        for model, tokens in plan.lacking.items():
            assert tokens > 0
            self.asked.append((model, tokens))
        return list(plan.ids)

    def dispatch(self, model: str, request_ids: Sequence[str]) -> None:
        engine = self.engines[model]
        assert engine.ready_in_s == 0
        for request_id in request_ids:
            assert request_id not in self.dispatched
            self.dispatched.append(request_id)
            engine.running[request_id] = self.requests[request_id].prompt_tokens
            engine.left[request_id] = self.requests[request_id].max_tokens
            self._grow(engine)
        assert len(engine.running) <= engine.max_running

    def advance(self) -> None:
        """Decodes a token of each running request that has room for it; frees idle memory."""
        for engine in self.engines.values():
            for request_id in list(engine.running):
                self._decode(engine, request_id)
            engine.mapped_tokens = blocks(engine.used_tokens, engine.quantum_tokens)

    def _decode(self, engine: Engine, request_id: str) -> None:
        engine.left[request_id] -= 1
        if engine.left[request_id] <= 0:
            del engine.running[request_id]

    def _grow(self, engine: Engine) -> None:
        while engine.mapped_tokens < engine.used_tokens:
            engine.mapped_tokens += engine.quantum_tokens
        assert self.free_bytes >= 0, "dispatched beyond the memory that is there"
