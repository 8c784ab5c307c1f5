"""Scheduler of vLLM on kvcached, with the figures that Prism reports."""

from __future__ import annotations

from typing import Any

from kvcached.engines.vllm.block_pool import ElasticBlockPool
from kvcached.engines.vllm.scheduler import ElasticScheduler


class PoolScheduler(ElasticScheduler):
    """Elastic scheduler that counts retractions: requests that lost their KV for lack of memory and
    compute it again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.retractions_total = 0

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.retractions_total += 1
        super()._preempt_request(*args, **kwargs)

    @property
    def pool(self) -> ElasticBlockPool:
        return self._pool

    def waiting_requests(self) -> list[Any]:
        return [*self.waiting, *self.kv_holding_waiting]

    def prefill_left(self) -> int:
        """Returns the number of tokens to compute in waiting requests and running prompts."""
        prefilling = (r for r in self.running if r.num_computed_tokens < r.num_prompt_tokens)
        left = sum(r.num_tokens - r.num_computed_tokens for r in prefilling)
        return int(left + sum(r.num_tokens for r in self.waiting_requests()))
