"""How much of a device a model takes at least: the arithmetic behind the start-up check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import cast

import msgspec

from kvcached import Layout, choose_layout
from kvcached.layouts import Arrangement
from prism.config import ClusterConfig, DeviceConfig, EngineConfig
from prism.errors import ActivationError
from prism.messages import ModelSpec

BLOCK_TOKENS = 16

# engine.kv_layout -> what may be chosen. By blocks is not among them: the engines index tokens,
# and tokens of interleaved blocks do not lie at one stride.
KV_LAYOUTS: dict[str, Sequence[Arrangement]] = {
    "per_layer": ("per_layer",),
    "token_interleaved": ("token_interleaved",),
    "auto": ("per_layer", "token_interleaved"),
}


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


def layout_of(model: ModelSpec) -> Layout:
    """Where the K and V of `model` lie."""
    layout = Layout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=model.kv_dtype,
        block_tokens=BLOCK_TOKENS,
        arrangement=cast("Arrangement", model.kv_arrangement),
    )
    if model.kv_arrangement == "per_layer" or model.token_bytes == layout.token_bytes:
        return layout
    return replace(layout, padded_token_bytes=model.token_bytes)


def shard_of(model: ModelSpec, ranks: int) -> ModelSpec:
    """What one of `ranks` tensor-parallel ranks holds of `model`: its part of the KV heads, per
    layer, and about its part of the weights.

    Raises ActivationError for heads that do not divide.
    """
    if model.num_kv_heads % ranks:
        raise ActivationError(
            f"model {model.name}: its {model.num_kv_heads} KV heads cannot be shared by {ranks} "
            "ranks; give it another tp"
        )
    shard = msgspec.structs.replace(
        model,
        num_kv_heads=model.num_kv_heads // ranks,
        weight_bytes=ceil(model.weight_bytes / ranks),
        kv_arrangement="per_layer",
        tp=1,
    )
    return msgspec.structs.replace(shard, token_bytes=layout_of(shard).token_bytes)


def arranged(model: ModelSpec, config: ClusterConfig, accepted: Sequence[Arrangement]) -> ModelSpec:
    """`model` in the accepted arrangement that suits the device where its quantum weighs most,
    shared by all models that may be there."""
    stock = layout_of(model)
    allowed = [d for d in config.devices if model.pinned_device in (None, d.name)]
    shared = {
        d.name: sum(m.pinned_device in (None, d.name) for m in config.models) for d in allowed
    }

    def share(device: DeviceConfig) -> float:
        quanta_bytes = stock.quantum_bytes(device.page_bytes) * shared[device.name]
        return quanta_bytes / device.capacity_bytes

    tightest = max(allowed, key=share)
    chosen = choose_layout(
        stock,
        page_bytes=tightest.page_bytes,
        device_bytes=tightest.capacity_bytes,
        models=shared[tightest.name],
        accepted=accepted,
    )
    return msgspec.structs.replace(
        model,
        kv_arrangement=chosen.layout.arrangement,
        token_bytes=sum(chosen.layout.buffer_token_bytes),
    )


def memory_need(model: ModelSpec, device: DeviceConfig, engine: EngineConfig) -> MemoryNeed:
    """What `model`, or its part if it is spread over several devices, must find free on `device` to
    serve at all."""
    model = shard_of(model, model.tp) if model.tp > 1 else model
    layout = layout_of(model)
    page_bytes = device.page_bytes
    slabs = ceil((model.context_length + BLOCK_TOKENS) / layout.slab_tokens(page_bytes))
    return MemoryNeed(
        weight_bytes=_whole_pages(model.weight_bytes, page_bytes),
        static_bytes=_whole_pages(engine.static_bytes, page_bytes),
        kv_bytes=slabs * layout.quantum_bytes(page_bytes),
    )


def _whole_pages(size_bytes: int, page_bytes: int) -> int:
    return ceil(size_bytes / page_bytes) * page_bytes
