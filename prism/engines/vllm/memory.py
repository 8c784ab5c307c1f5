"""The device memory of one engine process, as kvcached's parts of vLLM see it.

For them it stands for `kvcached.engines.vllm.memory.EngineMemory`. Its room has been reserved
already, and the agent has others make more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import kvcached
from kvcached.engines.packed import PackedLayout
from prism.engines.model_memory import MemoryPlan, ModelMemory
from prism.engines.model_memory import plan as plan_memory
from prism.messages.engine import ActivateEngine


def plan(order: ActivateEngine, **sizes: int) -> MemoryPlan:
    """`prism.engines.model_memory.plan`, its blocks as vLLM packs them."""
    planned = plan_memory(order, **sizes)
    stock = planned.layout
    packed = PackedLayout(
        dtype="int8",
        block_tokens=stock.block_tokens,
        arrangement=stock.arrangement,
        padded_token_bytes=stock.padded_token_bytes,
        packed_token_bytes=stock.token_bytes,
    )
    return dataclasses.replace(planned, layout=packed)


class EngineMemory(ModelMemory):
    """Of one active model. It is its own stake."""

    @property
    def stake(self) -> EngineMemory:
        return self

    @property
    def device(self) -> kvcached.Device:
        return self._device

    @property
    def client(self) -> kvcached.Client:
        return self._client

    def layout(self, block_bytes: int, block_tokens: int) -> kvcached.KVLayout:
        """Raises RuntimeError where the model's specification is not what vLLM lays out."""
        planned = self.plan.layout
        wanted = (block_tokens, block_bytes)
        if wanted != (planned.block_tokens, planned.block_tokens * planned.token_bytes):
            raise RuntimeError(
                f"vLLM's KV blocks hold {block_tokens} tokens in {block_bytes} bytes; the model's"
                f" specification says {planned}"
            )
        return planned

    def alloc_kvcache(
        self, layout: kvcached.KVLayout, num_tokens: int, request_tokens: int
    ) -> kvcached.KVCache:
        """Raises NotImplementedError for another number of tokens than was planned."""
        if num_tokens != self.plan.virtual_tokens:
            raise NotImplementedError(
                f"vLLM laid out {num_tokens} tokens of KV where {self.plan.virtual_tokens} were"
                " planned: this model's KV cache is not supported"
            )
        return self.kv

    def lease_static(self, measured_bytes: int) -> None:
        """Weights have their lease."""

    def find_room(self, kv: kvcached.KVCache, num_blocks: int) -> None:
        """Nothing is found: the agent has others make room before it is needed."""

    def ask_for(self, size_bytes: int, more_bytes: int = 0) -> None:
        """Nothing: the agent sees what waits."""

    def publish_evictable(self, size_bytes: int) -> None:
        """Nothing: it goes with the engine's status."""

    def answer_requests(self, shrink: Callable[[int | None], Any]) -> None:
        """Nothing: the worker loop answers between two steps."""
