"""The device memory of one engine process, as SGLang's pool and allocator see it (`PoolMemory`)."""

from __future__ import annotations

from dataclasses import replace

import kvcached
from prism.engines.model_memory import ModelMemory

_AMPLE = 8  # SGLang's bytes of a token differ from ours; `max_total_tokens` bounds what it lays out


class EngineMemory(ModelMemory):
    """Of one active model."""

    def pool_bytes(self, context_tokens: int) -> int:
        """More than the plan's tokens need, so that the token limit alone decides."""
        return _AMPLE * self.plan.virtual_tokens * self.plan.layout.token_bytes

    def kv_cache(self, layout: kvcached.Layout, num_tokens: int) -> kvcached.KVCache:
        """Raises RuntimeError where the model's specification is not what SGLang lays out: block
        ids beyond its own number would be indices out of range."""
        planned = replace(self.plan.layout, arrangement="per_layer", padded_token_bytes=None)
        if layout != planned:
            raise RuntimeError(
                f"KV layout mismatch: SGLang wants {layout}, the model's specification says"
                f" {planned}"
            )
        if num_tokens != self.plan.virtual_tokens:
            raise NotImplementedError(
                f"SGLang laid out {num_tokens} tokens of KV where {self.plan.virtual_tokens} were"
                " planned: this model's KV cache is not supported by this version"
            )
        return self.kv

    def rank_kv(self) -> kvcached.RankKV:
        """The KV space as one rank of its engine must use it."""
        return kvcached.RankKV(self.kv, self.ranks.all_true)

    def least(self, value: int) -> int:
        return self.ranks.least(value)

    def lacks(self, num_tokens: int) -> None:
        """Nothing: the agent sees what waits, and has others make room."""

    def find_room(self, num_blocks: int) -> None:
        """Nothing is found: the agent has others make room before it is needed."""
