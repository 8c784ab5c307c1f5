"""Device memory of one engine process, for kvcached's adapter of vLLM.

It replaces `kvcached.engines.vllm.memory.EngineMemory`. Its memory has already been reserved, and
the agent makes other engines free more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import kvcached
from kvcached.layouts import PackedLayout
from prism.engines.model_memory import MemoryPlan, ModelMemory
from prism.engines.model_memory import plan as plan_memory
from prism.messages.engine import ActivateEngine


def plan(order: ActivateEngine, **sizes: int) -> MemoryPlan:
    """Returns the plan of `prism.engines.model_memory.plan` with blocks as vLLM packs them."""
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
    """Memory of one active model, which is also its own share (`kvcached.engines.device_share`)."""

    @property
    def share(self) -> EngineMemory:
        return self

    @property
    def device(self) -> kvcached.Device:
        return self._device

    @property
    def client(self) -> kvcached.Client:
        return self._client

    def layout(self, block_bytes: int, block_tokens: int) -> kvcached.KVLayout:
        """Returns the planned layout. Raises RuntimeError if vLLM's layout differs from the model's
        specification."""
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
        """Returns the KV space. Raises NotImplementedError if the number of tokens differs from the
        plan."""
        if num_tokens != self.plan.virtual_tokens:
            raise NotImplementedError(
                f"vLLM laid out {num_tokens} tokens of KV where {self.plan.virtual_tokens} were"
                " planned: this model's KV cache is not supported"
            )
        return self.kv

    def lease_static(self, measured_bytes: int) -> None:
        """Does nothing: the weights already have a lease."""

    def find_room(self, kv: kvcached.KVCache, num_blocks: int) -> None:
        """Does nothing: the agent makes other engines free memory in advance."""

    def ask_for(self, size_bytes: int, more_bytes: int = 0) -> None:
        """Does nothing: the agent sees the waiting requests."""

    def publish_evictable(self, size_bytes: int) -> None:
        """Does nothing: the core publishes it with the engine's status."""

    def answer_requests(self, shrink: Callable[[int | None], Any]) -> None:
        """Does nothing: the worker loop answers between two steps."""
