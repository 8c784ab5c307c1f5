"""How much of a device a model takes at least: the arithmetic behind the start-up check."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, lcm

from prism.config import DeviceConfig, EngineConfig
from prism.messages import ModelSpec

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes. kv_bytes: the padding block's pages plus one request of the full context, in whole
    slabs, so that a single request can always run to its end."""

    weight_bytes: int
    static_bytes: int
    kv_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.static_bytes + self.kv_bytes


def memory_need(model: ModelSpec, device: DeviceConfig, engine: EngineConfig) -> MemoryNeed:
    """What `model` must find free on `device` to serve at all (per-layer layout)."""
    slab_bytes, slab_tokens = _slab(model, device.page_bytes)
    tokens = model.context_length + BLOCK_TOKENS
    kv_bytes = ceil(tokens / slab_tokens) * slab_bytes * 2 * model.num_layers
    return MemoryNeed(
        weight_bytes=ceil(model.weight_bytes / device.page_bytes) * device.page_bytes,
        static_bytes=ceil(engine.static_bytes / device.page_bytes) * device.page_bytes,
        kv_bytes=kv_bytes,
    )


def _slab(model: ModelSpec, page_bytes: int) -> tuple[int, int]:
    """(bytes, tokens) of one buffer's smallest run of pages that holds whole blocks."""
    buffer_token_bytes = model.token_bytes // (2 * model.num_layers)
    slab_bytes = lcm(buffer_token_bytes * BLOCK_TOKENS, page_bytes)
    return slab_bytes, slab_bytes // buffer_token_bytes
