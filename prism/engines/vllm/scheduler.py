"""Scheduler of vLLM on kvcached, with paused requests and the figures that Prism reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vllm.v1.request import RequestStatus

from kvcached.engines.vllm.block_pool import ElasticBlockPool
from kvcached.engines.vllm.scheduler import ElasticScheduler


class PoolScheduler(ElasticScheduler):
    """Elastic scheduler that can pause requests, and that counts retractions: requests that lost
    their KV for lack of memory and compute it again.

    Paused requests are in none of vLLM's queues. vLLM's worker keeps the state of those that have
    KV, as it does for requests that a step leaves out.
    """

    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.retractions_total = 0
        self._paused: dict[str, Any] = {}  # the one paused last is last
        self._places = self.max_num_active_reqs

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plans a step. If nothing runs and the waiting requests find no room, the next step has
        that of a paused one."""
        self.max_num_active_reqs = self._places - sum(map(_has_kv, self._paused.values()))
        plan = super().schedule(*args, **kwargs)
        if self._paused and self.waiting and not self.running:
            self._retract_paused()
        return plan

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.retractions_total += 1
        super()._preempt_request(*args, **kwargs)

    # --- paused requests -------------------------------------------------------------------

    def pause(self, rids: Sequence[str]) -> None:
        """Takes requests out of the next steps, with their KV."""
        for rid in rids:
            request = self.requests[rid]
            if rid not in self._paused:
                (self.running if _has_kv(request) else self.waiting).remove(request)
                self._paused[rid] = request

    def resume(self, rids: Sequence[str]) -> None:
        """Continues paused requests."""
        resumed = [self._paused.pop(rid) for rid in rids if rid in self._paused]
        self.running += filter(_has_kv, resumed)
        self.waiting.prepend_requests(r for r in reversed(resumed) if not _has_kv(r))

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        for request in finished:
            self._paused.pop(request.request_id, None)
        return finished

    def _find_room(self, count: int, short: int) -> None:
        super()._find_room(count, short)
        while self._paused and self.pool.hold(count) and self._retract_paused():
            pass

    def _retract_paused(self) -> bool:
        """Frees the KV of the request that was paused last. Returns False if none has KV."""
        last = next(filter(_has_kv, reversed(self._paused.values())), None)
        if last is not None:
            self._preempt_request(last, time.monotonic())
            self.waiting.remove(last)
        return last is not None

    # --- figures ---------------------------------------------------------------------------

    @property
    def pool(self) -> ElasticBlockPool:
        return self._pool

    def waiting_requests(self) -> list[Any]:
        paused = (r for r in self._paused.values() if not _has_kv(r))
        return [*self.waiting, *self.kv_holding_waiting, *paused]

    def prefill_left(self) -> int:
        """Returns the number of tokens to compute in waiting requests and running prompts."""
        running = (*self.running, *filter(_has_kv, self._paused.values()))
        prefilling = (r for r in running if r.num_computed_tokens < r.num_prompt_tokens)
        left = sum(r.num_tokens - r.num_computed_tokens for r in prefilling)
        return int(left + sum(r.num_tokens for r in self.waiting_requests()))


def _has_kv(request: Any) -> bool:
    return bool(request.status == RequestStatus.RUNNING)
