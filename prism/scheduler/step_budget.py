"""Budget of one scheduling step: slots, prefill work and KV memory of a device's engines.

A `StepBudget` is made for one step from the engines' views and shrinks with each request taken. So
a step never uses the same memory twice, although all engines see the same free device memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

from prism.policies.data import EngineView, request_kv_tokens


class StartResult(Enum):
    """Outcome of a try to start a request. Only MEMORY depends on other models."""

    STARTS = "starts"
    NOT_READY = "not ready"  # the model is being activated
    TRIAL = "trial"  # a suspect runs on the engine
    SLOTS = "slots"  # the engine has max_running requests
    PREFILL = "prefill"  # the engine has prefill work beyond the horizon
    LIMIT = "limit"  # the engine's own memory limit
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
        others_tokens = (self.view.running + self.taken) * self.view.block_tokens
        return request_kv_tokens(self.view, prompt_tokens + headroom_tokens) + others_tokens

    def start_result(
        self, need_tokens: int, shared_tokens: int, horizon_s: float, chunk_tokens: int
    ) -> StartResult:
        """Returns whether a request that needs `need_tokens` starts.

        Args:
            shared_tokens: rest of the shared tokens, within the engine's limit.
        """
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
        # Memory that other engines give back would not help.
        limited = limit_tokens is not None and need_tokens > max(0, self.own_tokens) + limit_tokens
        return StartResult.LIMIT if limited else StartResult.MEMORY


def starts_alone(
    view: EngineView,
    prompt_tokens: int,
    headroom_tokens: int,
    prefill_horizon_s: float,
    prefill_chunk_tokens: int,
) -> bool:
    """Returns whether the first request of a step starts; cheaper than a new `StepBudget`."""
    engine, limit = _EngineBudget(view), view.limit_tokens
    shared = view.shared_tokens if limit is None else min(view.shared_tokens, limit)
    need_tokens = engine.need_tokens(prompt_tokens, headroom_tokens)
    result = engine.start_result(need_tokens, shared, prefill_horizon_s, prefill_chunk_tokens)
    return result is StartResult.STARTS


class StepBudget:
    """Budget of one step.

    Args:
        prefill_horizon_s: an engine with more prefill work than this takes no requests. They would
            wait inside the engine, where a request with an earlier deadline cannot overtake them.
        prefill_chunk_tokens: an engine with less prefill work than this takes requests in any case,
            because smaller prefill steps waste its time.
    """

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
        """Returns the KV tokens that must be free for the request to start, in whole blocks.

        They include one block for each running request, which may need its next block soon.
        """
        return self._engines[model].need_tokens(prompt_tokens, headroom_tokens)

    def free_tokens(self, model: str) -> int:
        """Returns the KV tokens that `model` can still take in this step."""
        engine = self._engines[model]
        return max(0, engine.own_tokens) + self._shared_left_tokens(engine)

    def is_guaranteed(self, model: str, need_tokens: int) -> bool:
        """Returns whether `need_tokens` fit into memory that no other model can take."""
        return need_tokens <= self._engines[model].guaranteed_tokens

    def start_result(self, model: str, need_tokens: int) -> StartResult:
        """Returns whether one more request of `model` that needs `need_tokens` starts."""
        engine = self._engines[model]
        shared_tokens = self._shared_left_tokens(engine)
        return engine.start_result(need_tokens, shared_tokens, self._horizon_s, self._chunk_tokens)

    def is_open(self, model: str) -> bool:
        """Returns whether one more request of `model` starts if KV memory suffices."""
        return self.start_result(model, 0) is StartResult.STARTS

    def take(self, model: str, prompt_tokens: int, headroom_tokens: int) -> None:
        """Subtracts a request that starts. REQUIRES: `start_result` returned STARTS for it."""
        engine = self._engines[model]
        tokens = request_kv_tokens(engine.view, prompt_tokens + headroom_tokens)
        from_own = min(tokens, max(0, engine.own_tokens))
        engine.own_tokens -= from_own
        engine.guaranteed_tokens -= tokens
        self._take_shared(engine, tokens - from_own)
        engine.taken += 1
        engine.pending_prefill_s += prompt_tokens / engine.view.prefill_tokens_per_s

    def _take_shared(self, engine: _EngineBudget, tokens: int) -> None:
        """Takes whole quanta of shared memory. The rest of the last one becomes the engine's."""
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
        """Returns whether the engine runs no request and none was taken in this step."""
        engine = self._engines[model]
        return engine.view.running + engine.taken == 0

    def has_taken(self, model: str) -> bool:
        """Returns whether a request of `model` was taken in this step."""
        return self._engines[model].taken > 0

    def on_trial(self, model: str) -> bool:
        """Returns whether a suspect runs on the engine."""
        return self._engines[model].view.on_trial

    def __contains__(self, model: object) -> bool:
        return model in self._engines

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)
