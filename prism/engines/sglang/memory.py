"""Device memory of one engine process, for SGLang's pool and allocator (`PoolMemory`)."""

from __future__ import annotations

from dataclasses import replace

import kvcached
from kvcached.engines.sglang.memory import Pool
from prism.engines.model_memory import ModelMemory

_OVERSIZE = 8  # SGLang computes other token sizes than kvcached; `max_total_tokens` is the limit


class EngineMemory(ModelMemory):
    """Memory of one active model."""

    def pool_bytes(self, context_tokens: int, window_tokens: int) -> int:
        """Returns more than the plan's tokens need, so that only the token limit applies."""
        layouts = [self.plan.layout, *(pool.layout for pool in self.plan.side.values())]
        token_bytes = sum(layout.token_bytes for layout in layouts)
        return _OVERSIZE * self.plan.virtual_tokens * token_bytes

    def kv_cache(
        self, layout: kvcached.KVLayout, num_tokens: int, pool: Pool = "full"
    ) -> kvcached.KVCache:
        """Returns the KV space. Raises RuntimeError if SGLang's layout differs from the model's
        specification, since block ids above SGLang's own number would be out of range."""
        side = self.plan.side.get(pool)
        if side is None and pool != "full":
            raise RuntimeError(f"SGLang has a {pool} pool, but the model's specification has none")
        planned = side.layout if side else _per_layer(self.plan.layout)
        tokens = self.plan.side_tokens[pool] if side else self.plan.virtual_tokens
        if layout != planned:
            raise RuntimeError(
                f"KV layout mismatch: SGLang needs {layout}, but the model's specification gives"
                f" {planned}"
            )
        if num_tokens != tokens:
            raise NotImplementedError(
                f"SGLang laid out {num_tokens} tokens of KV where {tokens} were planned: this"
                " model's KV cache is not supported by this version"
            )
        return self.side_kv(pool) if side else self.kv

    def rank_kv(self, kv: kvcached.KVCache) -> kvcached.RankKV:
        """Returns a KV space for one rank of an engine, whose allocations all ranks agree on."""
        return kvcached.RankKV(kv, self.ranks.all_true)

    def least(self, value: int) -> int:
        return self.ranks.least(value)

    def report_shortage(self, num_tokens: int) -> None:
        """Does nothing: the agent sees the waiting requests and makes other engines free memory."""

    def find_room(self, kv: kvcached.KVCache, num_blocks: int) -> None:
        """Does nothing: the agent makes other engines free memory in advance."""


def _per_layer(layout: kvcached.KVLayout) -> kvcached.KVLayout:
    return replace(layout, arrangement="per_layer", padded_token_bytes=None)
