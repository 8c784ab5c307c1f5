"""How much of a device a model takes at least: the arithmetic behind the start-up check."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from kvcached import Layout
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
    layout = Layout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=model.kv_dtype,
        block_tokens=BLOCK_TOKENS,
    )
    page_bytes = device.page_bytes
    slabs = ceil((model.context_length + BLOCK_TOKENS) / layout.slab_tokens(page_bytes))
    return MemoryNeed(
        weight_bytes=_whole_pages(model.weight_bytes, page_bytes),
        static_bytes=_whole_pages(engine.static_bytes, page_bytes),
        kv_bytes=slabs * layout.quantum_bytes(page_bytes),
    )


def _whole_pages(size_bytes: int, page_bytes: int) -> int:
    return ceil(size_bytes / page_bytes) * page_bytes
