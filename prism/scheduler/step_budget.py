"""What can start at once: slots, prefill work and KV memory of a device's engines.

A `StepBudget` lives for one scheduling step. It starts from the engines' views and shrinks with
each request taken, so that a step never hands out the same memory twice: two engines that both
see the device's free room share it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

from prism.scheduler.ports import EngineView


class StartResult(Enum):
    """Why a request cannot start, or that it can. Only MEMORY is shared between models."""

    STARTS = "starts"
    NOT_READY = "not ready"
    TRIAL = "trial"
    SLOTS = "slots"
    PREFILL = "prefill"
    LIMIT = "limit"
    MEMORY = "memory"


class _EngineBudget:
    __slots__ = (
        "guaranteed_tokens",
        "limit_tokens",
        "own_tokens",
        "pending_prefill_s",
        "taken",
        "view",
    )

    def __init__(self, view: EngineView) -> None:
        self.view = view
        self.own_tokens = view.own_tokens
        self.guaranteed_tokens = view.guaranteed_tokens
        self.limit_tokens = view.limit_tokens
        self.pending_prefill_s = view.pending_prefill_s
        self.taken = 0

    def need_tokens(self, prompt_tokens: int, headroom_tokens: int) -> int:
        block = self.view.block_tokens
        blocks = -(-(prompt_tokens + headroom_tokens) // block)
        return (blocks + self.view.running + self.taken) * block

    def start_result(
        self, need_tokens: int, shared_tokens: int, horizon_s: float, chunk_tokens: int
    ) -> StartResult:
        """`shared_tokens`: what is left to it of the device's."""
        view = self.view
        if view.ready_in_s > 0:
            return StartResult.NOT_READY
        if view.on_trial:
            return StartResult.TRIAL
        if view.running + self.taken >= view.max_running:
            return StartResult.SLOTS
        pending_s = self.pending_prefill_s
        if pending_s > horizon_s and pending_s > chunk_tokens / view.prefill_tokens_per_s:
            return StartResult.PREFILL
        if need_tokens <= max(0, self.own_tokens) + shared_tokens:
            return StartResult.STARTS
        limit_tokens = self.limit_tokens
        # no memory of others would help it
        limited = limit_tokens is not None and need_tokens > max(0, self.own_tokens) + limit_tokens
        return StartResult.LIMIT if limited else StartResult.MEMORY


def starts_alone(
    view: EngineView,
    prompt_tokens: int,
    headroom_tokens: int,
    prefill_horizon_s: float,
    prefill_chunk_tokens: int,
) -> bool:
    """As a fresh `StepBudget` would say of its first request, at a fraction of the cost."""
    engine, limit = _EngineBudget(view), view.limit_tokens
    shared = view.shared_tokens if limit is None else min(view.shared_tokens, limit)
    need_tokens = engine.need_tokens(prompt_tokens, headroom_tokens)
    result = engine.start_result(need_tokens, shared, prefill_horizon_s, prefill_chunk_tokens)
    return result is StartResult.STARTS


class StepBudget:
    """prefill_horizon_s: an engine with more prefill work than this takes no more requests yet,
    since they would only wait inside it, where no later deadline can overtake them. But a step's
    worth of work (prefill_chunk_tokens) never waits here: smaller steps waste the engine."""

    def __init__(
        self,
        views: Iterable[EngineView],
        prefill_horizon_s: float,
        prefill_chunk_tokens: int = 0,
    ) -> None:
        self._horizon_s = prefill_horizon_s
        self._chunk_tokens = prefill_chunk_tokens
        self._shared_taken_bytes = 0
        self._engines = {view.model: _EngineBudget(view) for view in views}

    def need_tokens(self, model: str, prompt_tokens: int, headroom_tokens: int) -> int:
        """KV tokens that must be free for the request to start, in whole blocks; one more block
        for each running request, which may need its next one any moment."""
        return self._engines[model].need_tokens(prompt_tokens, headroom_tokens)

    def free_tokens(self, model: str) -> int:
        """What `model` could take now, after what this step has taken."""
        engine = self._engines[model]
        return max(0, engine.own_tokens) + self._shared_left_tokens(engine)

    def is_guaranteed(self, model: str, need_tokens: int) -> bool:
        """The request fits into memory that no other model could have."""
        return need_tokens <= self._engines[model].guaranteed_tokens

    def start_result(self, model: str, need_tokens: int) -> StartResult:
        """Whether one more request of `model` that needs `need_tokens` starts at once."""
        engine = self._engines[model]
        shared_tokens = self._shared_left_tokens(engine)
        return engine.start_result(need_tokens, shared_tokens, self._horizon_s, self._chunk_tokens)

    def is_open(self, model: str) -> bool:
        """Whether one more request of `model` starts if there is KV memory for it."""
        return self.start_result(model, 0) is StartResult.STARTS

    def take(self, model: str, prompt_tokens: int, headroom_tokens: int) -> None:
        """The request starts. REQUIRES: `start_result` said STARTS."""
        engine = self._engines[model]
        block = engine.view.block_tokens
        tokens = -(-(prompt_tokens + headroom_tokens) // block) * block
        from_own = min(tokens, max(0, engine.own_tokens))
        engine.own_tokens -= from_own
        engine.guaranteed_tokens -= tokens
        self._take_shared(engine, tokens - from_own)
        engine.taken += 1
        engine.pending_prefill_s += prompt_tokens / engine.view.prefill_tokens_per_s

    def _take_shared(self, engine: _EngineBudget, tokens: int) -> None:
        """What is left of the last quantum is this engine's own from now on."""
        quantum = engine.view.quantum_tokens
        quanta_tokens = min(-(-tokens // quantum) * quantum, self._shared_left_tokens(engine))
        engine.own_tokens += quanta_tokens - tokens
        if engine.limit_tokens is not None:
            engine.limit_tokens -= quanta_tokens
        self._shared_taken_bytes += quanta_tokens * engine.view.token_bytes

    def _shared_left_tokens(self, engine: _EngineBudget) -> int:
        left_tokens = self._device_left_tokens(engine)
        return left_tokens if engine.limit_tokens is None else min(left_tokens, engine.limit_tokens)

    def _device_left_tokens(self, engine: _EngineBudget) -> int:
        view = engine.view
        if not self._shared_taken_bytes:
            return view.shared_tokens
        left_bytes = view.shared_tokens * view.token_bytes - self._shared_taken_bytes
        quantum_bytes = view.quantum_tokens * view.token_bytes
        return max(0, left_bytes // quantum_bytes) * view.quantum_tokens

    def idle(self, model: str) -> bool:
        """Nothing runs there and nothing was taken for it."""
        engine = self._engines[model]
        return engine.view.running + engine.taken == 0

    def has_taken(self, model: str) -> bool:
        """A request of this step starts there."""
        return self._engines[model].taken > 0

    def on_trial(self, model: str) -> bool:
        """A suspect runs there."""
        return self._engines[model].view.on_trial

    def __contains__(self, model: object) -> bool:
        return model in self._engines

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)
