"""Memory that models and engine processes take on a device, and checks that it suffices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil
from typing import Any, Literal, cast

import msgspec

from kvcached import KVLayout, Layout, MLALayout, choose_layout
from kvcached.layouts import Arrangement, heads_of_rank, state_layout
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig, EngineConfig
from prism.config.schema.units import format_size, whole_mib
from prism.errors import ActivationError, ConfigError
from prism.messages.model_spec import ModelSpec

BLOCK_TOKENS = 16

# engine.kv_layout -> arrangements to choose from. Interleaved blocks are excluded: engines index
# tokens, and tokens of interleaved blocks do not have a constant stride.
KV_LAYOUTS: dict[str, Sequence[Arrangement]] = {
    "per_layer": ("per_layer",),
    "token_interleaved": ("token_interleaved",),
    "auto": ("per_layer", "token_interleaved"),
}


@dataclass(frozen=True, slots=True)
class GpuNeeds:
    """Planned memory of an engine process on a GPU outside of kvcached, until it is measured.

    An adapter reports its engines' needs in bytes, and 0 for what they never use.
    """

    # The CUDA context, before any kernel is loaded.
    context_bytes: int = 0
    # Kernels and tables that are loaded by use, and stay without a model.
    code_bytes: int = 0
    # Graphs, library handles and stacks outside of torch's allocator.
    driver_bytes: int = 0
    # NCCL, if there are several ranks.
    ranks_bytes: int = 0
    # The least memory of torch's allocator that can serve a model.
    torch_min_bytes: int = 0

    @property
    def idle_bytes(self) -> int:
        """Memory of a process without a model."""
        return self.context_bytes + self.code_bytes

    def outside_torch_bytes(self, ranks: int) -> int:
        """Returns the memory of a process with a model, without the idle part and torch's
        allocator."""
        return self.driver_bytes + (self.ranks_bytes if ranks > 1 else 0)

    def static_min_bytes(self, ranks: int) -> int:
        """Returns the smallest `engine.static` that can work."""
        return self.idle_bytes + self.outside_torch_bytes(ranks) + max(1, self.torch_min_bytes)


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Properties of an adapter's engines that do not depend on the device."""

    # Tokens of a KV block.
    block_tokens: int = BLOCK_TOKENS
    # Tokens of a block of latents (MLA). None: as of others.
    latent_block_tokens: int | None = None
    # Supported arrangements of KV. Empty: `engine.kv_layout` decides.
    arrangements: tuple[Arrangement, ...] = ()
    # True if a model may be spread over several devices.
    spreads: bool = True
    # Families (`model_type`) that can be spread only if `tp` divides their KV heads; of others,
    # several devices may have the same head.
    divided_heads: frozenset[str] = frozenset()
    # True if LoRA adapters are supported.
    lora: bool = False
    # Methods of quantized weights that engines on GPUs load, as a config.json names them.
    quantized: frozenset[str] = frozenset()
    # Families (`model_type`) whose layers with sliding windows have a separate pool.
    window_pools: frozenset[str] = frozenset()
    # Families of which engines compute sliding windows (None: all). Others are served within them.
    windows: frozenset[str] | None = None
    # Regular expression of the weights that each rank has, searched in "model_type:tensor".
    whole_weights: str = "^$"
    # Types of KV other than a model's own (`kv_cache_dtype`), each with the attention backends on
    # GPUs that read it for K and V heads, and those that read it for latents.
    kv_dtypes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    latent_attention: frozenset[str] = frozenset()
    # Families (`model_type`) that take images.
    images: frozenset[str] = frozenset()
    # Families among them that several devices can share.
    image_ranks: frozenset[str] = frozenset()
    # Families among them whose language models may have LoRA adapters.
    image_adapters: frozenset[str] = frozenset()
    # Vectors of images that an engine keeps on its device.
    image_vectors_bytes: int = 0
    # Returns the layers of a block where these layers share the main pool's blocks with the others,
    # by the numbers of layers with all tokens' KV and of others, which have a window or a state.
    # None: others have separate pools.
    block_layers: Callable[[int, int], int] | None = None

    def block_tokens_of(self, *, latent: bool) -> int:
        """Returns the tokens of a block of a model with latents or with K and V heads."""
        return (latent and self.latent_block_tokens) or self.block_tokens


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Free memory of a device that a model needs to serve at all."""

    weight_bytes: int
    static_bytes: int
    # The padding block's pages plus one request of the full context, in whole slabs, so that a
    # single request can always run to its end.
    kv_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.static_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True)
class PoolNeed:
    """Memory pool of a model, and what one request of the full context holds there."""

    name: Literal["full", "window", "state"]
    layout: KVLayout
    tokens: int

    def slabs(self, page_bytes: int) -> int:
        """Returns the slabs of that request and of a padding block."""
        blocks = ceil(self.tokens / self.layout.block_tokens) + 1
        return ceil(blocks * self.layout.block_tokens / _slab(self.layout, page_bytes)[0])

    def need_bytes(self, page_bytes: int) -> int:
        """Returns the bytes of these slabs."""
        return self.slabs(page_bytes) * _slab(self.layout, page_bytes)[1]


def pools_of(model: ModelSpec, chunk_tokens: int) -> tuple[PoolNeed, ...]:
    """Returns the pools of `model`, the main one first. `chunk_tokens`: of a prefill step."""
    in_groups = model.window_groups * group_tokens(model, chunk_tokens) + state_tokens(model)
    pools = [PoolNeed("full", layout_of(model), model.context_length + in_groups)]
    if model.window_layers and not model.window_groups:
        layout = Layout(
            num_layers=model.window_layers,
            num_kv_heads=model.window_kv_heads,
            head_dim=model.window_head_dim,
            dtype=model.kv_dtype,
            block_tokens=model.block_tokens,
        )
        kept = window_kept(layout, model.window_tokens, chunk_tokens)
        pools.append(PoolNeed("window", layout, min(model.context_length, kept)))
    if model.state_bytes and not model.state_groups:
        pools.append(PoolNeed("state", state_layout(model.state_bytes), 1))
    return tuple(pools)


def window_kept(layout: KVLayout, window_tokens: int, chunk_tokens: int) -> int:
    """Returns the most tokens that a request keeps in the pool of a window.

    Engines keep the window before an answer until it is as long as a window, free whole blocks, and
    keep one beyond the window for their prefix cache.
    """
    return window_tokens + max(window_tokens, chunk_tokens) + 2 * layout.block_tokens


def side_need(main: KVLayout, side: Mapping[str, PoolNeed]) -> dict[str, Any]:
    """Returns what a request takes in the pools besides the main one, as the fields of
    `prism.policies.data.RequestNeed`."""
    need: dict[str, Any] = {}
    if window := side.get("window"):
        need["window_tokens"] = window.tokens
        need["window_share"] = window.layout.token_bytes / main.token_bytes
    if state := side.get("state"):
        need["state_tokens"] = -(-state.layout.token_bytes // main.token_bytes)
    return need


def group_tokens(model: ModelSpec, chunk_tokens: int) -> int:
    """Returns the most tokens that a request keeps in a group of layers with a window.

    A step takes blocks for its tokens after those that the window has left are freed.
    """
    block = model.block_tokens
    kept = ceil((model.window_tokens - 1 + chunk_tokens) / block) + 1
    return block * min(kept, ceil(model.context_length / block))


def state_tokens(model: ModelSpec) -> int:
    """Returns the tokens of the blocks that a request's state takes in the main pool."""
    return model.state_groups * model.block_tokens


def step_tokens(model: ModelSpec, chunk_tokens: int, max_running: int) -> int:
    """Returns the tokens of a step, as engines count them for windows: a chunk of prefill, and with
    groups of layers also a token of each running request."""
    return chunk_tokens + (max_running if model.window_groups else 0)


def grouped(model: ModelSpec, block_layers: Callable[[int, int], int]) -> ModelSpec:
    """Returns `model` with layers in groups that share blocks (`EngineTraits.block_layers`). Blocks
    have as many tokens as a layer's state needs."""
    others = model.window_layers or model.state_layers
    layers = block_layers(model.kv_layers, others)
    groups = ceil(others / layers)
    if model.window_layers:
        return msgspec.structs.replace(model, kv_layers=layers, window_groups=groups)
    layer_bytes = model.block_tokens * model.token_bytes // model.kv_layers
    blocks = ceil(model.state_bytes // model.state_layers / layer_bytes)
    return msgspec.structs.replace(
        model,
        kv_layers=layers,
        state_groups=groups,
        block_tokens=blocks * model.block_tokens,
    )


def layout_of(model: ModelSpec) -> KVLayout:
    """Returns the layout of the KV of `model`, in its main pool."""
    layout = _layout(model, model.latent_rope_dim)
    if model.kv_arrangement == "per_layer" or model.token_bytes == layout.token_bytes:
        return layout
    return replace(layout, padded_token_bytes=model.token_bytes)


def _layout(model: ModelSpec, rope_dim: int | None) -> KVLayout:
    common: dict[str, Any] = {
        "num_layers": model.kv_layers or model.num_layers,
        "dtype": model.kv_dtype,
        "block_tokens": model.block_tokens,
        "arrangement": cast("Arrangement", model.kv_arrangement),
    }
    if rope_dim is None:
        return Layout(num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, **common)
    return MLALayout(kv_lora_rank=model.head_dim - rope_dim, rope_dim=rope_dim, **common)


def undivided(model: ModelSpec, ranks: int) -> str:
    """Returns what of `model` cannot be shared by `ranks` tensor-parallel ranks, "" if all can."""
    if model.latent_rope_dim is None and not heads_of_rank(model.num_kv_heads, ranks):
        return f"{model.num_kv_heads} KV heads"
    if model.window_layers and not heads_of_rank(model.window_kv_heads, ranks):
        return f"{model.window_kv_heads} KV heads of layers with a window"
    rest = (f"{number} {name}" for name, number in model.divided.items() if number % ranks)
    return next(rest, "")


def shard_of(model: ModelSpec, ranks: int) -> ModelSpec:
    """Returns the part of `model` on one of `ranks` tensor-parallel ranks: its KV heads, per layer,
    its part of the states, and about its part of the weights. Every rank keeps whole latents.

    Raises ActivationError if the ranks cannot share the model.
    """
    if odd := undivided(model, ranks):
        raise ActivationError(
            f"model {model.name}: its {odd} cannot be shared by {ranks} ranks; give it another tp"
        )

    def part(size_bytes: int, whole_bytes: int = 0) -> int:
        return whole_bytes + ceil((size_bytes - whole_bytes) / ranks)

    is_latent = model.latent_rope_dim is not None
    kv_heads = 1 if is_latent else heads_of_rank(model.num_kv_heads, ranks)
    more_heads = 0 if is_latent else kv_heads * ranks - model.num_kv_heads
    more_bytes = more_heads * model.kv_head_weight_bytes
    shard = msgspec.structs.replace(
        model,
        num_kv_heads=kv_heads,
        window_kv_heads=model.window_layers and heads_of_rank(model.window_kv_heads, ranks),
        state_bytes=part(model.state_bytes, model.whole_state_bytes),
        weight_bytes=part(model.weight_bytes + more_bytes, model.whole_weight_bytes),
        derived_bytes=part(model.derived_bytes),
        kv_arrangement="per_layer",
        tp=1,
    )
    return msgspec.structs.replace(shard, token_bytes=layout_of(shard).token_bytes)


def spread_over(model: ModelSpec, tp: int) -> ModelSpec:
    """Returns `model` on `tp` devices, which keep their part of the heads per layer. With `tp` 1 it
    must be on one device already. Raises ActivationError if they cannot share it."""
    if tp == 1:
        return model
    token_bytes = shard_of(model, tp).token_bytes * tp  # some KV is on every device
    return msgspec.structs.replace(
        model, tp=tp, kv_arrangement="per_layer", token_bytes=token_bytes
    )


def arranged(model: ModelSpec, config: ClusterConfig, accepted: Sequence[Arrangement]) -> ModelSpec:
    """Returns `model` in the accepted arrangement that suits the device where its quantum, shared
    by all models that may be there, weighs most."""
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
    """Returns the memory that `model`, or its part if it is spread over several devices, needs free
    on `device` to serve at all, in addition to idle engine processes
    (`DeviceConfig.engines_bytes`)."""
    # A rank of a spread model may be a process in addition to the device's pool.
    held_bytes = device.idle_bytes if model.tp == 1 else 0
    share_bytes = max(0, engine.static_on(device.name) - held_bytes)
    model = shard_of(model, model.tp) if model.tp > 1 else model
    page_bytes = device.page_bytes
    pools = pools_of(model, step_tokens(model, engine.prefill_chunk_tokens, engine.max_running))
    return MemoryNeed(
        weight_bytes=whole_pages(model.weight_bytes, page_bytes),
        static_bytes=whole_pages(share_bytes + model.besides_weights_bytes, page_bytes),
        kv_bytes=sum(pool.need_bytes(page_bytes) for pool in pools),
    )


@lru_cache(maxsize=1 << 12)
def _slab(layout: KVLayout, page_bytes: int) -> tuple[int, int]:
    """Returns tokens and bytes of a slab. Cached, since it is called for each model on each
    device."""
    return layout.slab_tokens(page_bytes), layout.quantum_bytes(page_bytes)


TP_DEGREES = (1, 2, 4, 8)
"""Numbers of devices that are chosen for a model that names none."""


def kind_of(device: DeviceConfig, engine: EngineConfig) -> Hashable:
    """Returns a key that is equal for devices of the same capacity on which every model needs the
    same memory."""
    static_bytes = engine.static_on(device.name)
    return device.page_bytes, device.idle_bytes, static_bytes, device.capacity_bytes, device.engines


def one_of_each_kind(config: ClusterConfig) -> list[DeviceConfig]:
    """Returns one device of each kind."""
    return list({kind_of(device, config.engine): device for device in config.devices}.values())


def whole_pages(size_bytes: int, page_bytes: int) -> int:
    """Returns `size_bytes` rounded up to whole pages."""
    return ceil(size_bytes / page_bytes) * page_bytes


# --- checks ----------------------------------------------------------------------------------


def check_static(config: ClusterConfig, device: str, needs: GpuNeeds) -> None:
    """Raises ConfigError, with a sufficient value, if `engine.static` on a GPU is smaller than the
    context and the least that torch can work with. Every activation would fail."""
    ranks = max((model.tp for model in config.models), default=1)
    least_bytes, static_bytes = needs.static_min_bytes(ranks), config.engine.static_on(device)
    if static_bytes < least_bytes:
        raise ConfigError(
            f"engine.static: {format_size(static_bytes)} is too small for an engine on {device}:"
            f" CUDA context and code {format_size(needs.idle_bytes)}, graphs and NCCL"
            f" {format_size(needs.outside_torch_bytes(ranks))}, torch at least"
            f" {format_size(needs.torch_min_bytes)}; set it to {whole_mib(least_bytes)} or more, or"
            " leave the key out"
        )


def check_memory(config: ClusterConfig) -> None:
    """Raises ConfigError, with a sufficient value, if a model does not fit."""
    for index in range(len(config.devices)):
        _check_device_serves(config, index)
    for index in range(len(config.models)):
        check_model_fits(config, index)


def _check_device_serves(config: ClusterConfig, index: int) -> None:
    """Raises ConfigError if no model fits on the device, although some may be there."""
    device, engine = config.devices[index], config.engine
    here = [i for i, m in enumerate(config.models) if m.pinned_device in (None, device.name)]
    needs = (memory_need(config.models[i], device, engine) for i in here)
    if not here or any(need.total_bytes <= device.models_bytes for need in needs):
        return
    need, model = min(
        ((memory_need(config.models[i], device, engine), i) for i in here),
        key=lambda pair: pair[0].total_bytes,
    )
    spec = config.models[model]
    raise ConfigError(
        f"{config.device_key(index)}.capacity: {format_size(device.capacity_bytes)} is too small"
        f" for any model; {spec.name} needs {_explain(need, spec, device)}; raise capacity to"
        f" {_enough(need, device)} or lower models[{model}].context_length"
    )


def check_model_fits(config: ClusterConfig, index: int) -> None:
    """Raises ConfigError, with a sufficient value, if one of the models does not fit."""
    spec = config.models[index]
    allowed = [(i, d) for i, d in enumerate(config.devices) if spec.pinned_device in (None, d.name)]
    best, device = max(allowed, key=lambda pair: pair[1].models_bytes)
    need = memory_need(spec, device, config.engine)
    if spec.tp > 1:
        _check_parts_fit(config, index, need, device)
    elif need.total_bytes > device.models_bytes:
        raise ConfigError(
            f"models[{index}]: {spec.name} needs {_explain(need, spec, device)} and {device.name}"
            f" has {format_size(device.capacity_bytes)}; raise {config.device_key(best)}.capacity"
            f" to {_enough(need, device)} or lower models[{index}].context_length"
        )


def _check_parts_fit(
    config: ClusterConfig, index: int, need: MemoryNeed, best: DeviceConfig
) -> None:
    spec, engine = config.models[index], config.engine
    fits = {
        kind_of(each, engine): memory_need(spec, each, engine).total_bytes <= each.models_bytes
        for each in one_of_each_kind(config)
    }
    fitting = Counter(each.node for each in config.devices if fits[kind_of(each, engine)])
    most = max(fitting.values(), default=0)
    if most < spec.tp:
        raise ConfigError(
            f"models[{index}].tp: {spec.name} needs {_explain(need, spec, best)} on each of"
            f" {spec.tp} devices of one kind and page size, and only {most} have it; raise their"
            f" capacity to {_enough(need, best)}, add devices or lower tp"
        )


def _enough(need: MemoryNeed, device: DeviceConfig) -> str:
    return whole_mib(need.total_bytes + device.engines_bytes)


def _explain(need: MemoryNeed, spec: ModelSpec, device: DeviceConfig) -> str:
    idle = ""
    if device.engines_bytes:
        idle = f", besides {format_size(device.engines_bytes)} of {device.engines} idle engines"
    return (
        f"{format_size(need.total_bytes)} (weights {format_size(need.weight_bytes)}, fixed share"
        f" {format_size(need.static_bytes)}, KV of one {spec.context_length}-token request"
        f" {format_size(need.kv_bytes)}{idle})"
    )
