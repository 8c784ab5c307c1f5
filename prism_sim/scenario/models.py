"""Memory and step costs of a model, from its shape."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcached.layouts import state_layout
from prism.config.checks.kv_cache import AUTO, KV_CACHE_DTYPES
from prism.config.checks.memory_needs import TP_DEGREES, PoolNeed, side_need, window_kept
from prism.config.schema.slo import SloYaml
from prism.config.schema.units import format_size
from prism.errors import ConfigError, TooLargeError
from prism.models.files import config_file
from prism.policies.multiplexing.kv_blocks import KvShape
from prism_sim.core.setup import UNLIMITED_TOKENS, DegreeSetup, KvNeed, ModelSetup
from prism_sim.costs.catalog import HOST_S, cost_model, model_shape
from prism_sim.costs.gpus import GpuSpec
from prism_sim.costs.shapes import ModelShape, known_shape
from prism_sim.scenario.config import SimEngineYaml, SimModelYaml


@dataclass(frozen=True, slots=True)
class ModelContext:
    """Cluster settings on which a model's setup depends."""

    gpu: GpuSpec
    # Folder of the YAML, for relative paths.
    folder: Path
    engine: SimEngineYaml
    page_bytes: int
    capacity_bytes: int
    # Node of each device.
    nodes: tuple[str, ...]
    # Number of models per device, for the layout "auto".
    shared: int
    slo: SloYaml
    slo_scale: float
    cost_files: tuple[Path, ...] = ()


def model_setup(
    index: int, model: SimModelYaml, tokens: NDArray[np.int64], context: ModelContext
) -> ModelSetup:
    """Returns a model's setup. Raises ConfigError if the model is unknown, TooLargeError if it does
    not fit on its GPUs with any of its requests. tokens: Prompt and output of each request."""
    shape = _shape(model, context.folder)
    if model.tp != "auto":
        _check_degree(model.name, model.tp, len(context.nodes))
        return _setup_at(model.tp, index, model, tokens, context)
    possible = (1,) if model.device is not None else usual_degrees(shape, context)
    found: ModelSetup | None = None
    for tp in possible:
        try:
            found = _setup_at(tp, index, model, tokens, context)
        except TooLargeError:
            if tp == possible[-1] and found is None:
                raise
            continue
        if found.kv_tokens == UNLIMITED_TOKENS:  # its longest request fits, too
            break
    assert found is not None
    least = found.tp
    chosen = tuple(d for d in possible if d >= least and d in found.parts)
    return replace(found, degrees=chosen if len(chosen) > 1 else ())


def usual_degrees(shape: ModelShape, context: ModelContext) -> tuple[int, ...]:
    """Returns the degrees that divide the model's heads and fit into a node."""
    most = max(Counter(context.nodes).values())
    return tuple(d for d in TP_DEGREES if d <= most and not shape.heads % d)


def _setup_at(
    tp: int, index: int, model: SimModelYaml, tokens: NDArray[np.int64], context: ModelContext
) -> ModelSetup:
    shape, engine = _shape(model, context.folder), context.engine
    weights_bytes = shape.weight_bytes()
    if model.weights is not None:
        weights_bytes = int(model.weights)
    static_bytes = int(engine.static)
    kept = shape if shape.is_uniform else shape.kept_by_rank(tp)
    rank_token_bytes = shape.kv_token_bytes(tp)
    parts = model_parts(tp, model, shape, context)
    part = parts[tp]
    context_tokens = shape.decoder.context_tokens
    room_bytes = context.capacity_bytes - -(-weights_bytes // tp) - static_bytes

    def fits(tokens: int) -> bool:
        return _floor_bytes(kept, tokens, part, context) <= room_bytes

    kv_tokens, longest = _longest_served(tokens[tokens <= context_tokens], fits)
    reserve = model.kv_reserve_tokens or longest if engine.memory_reserve else 0
    floor_bytes = _floor_bytes(kept, reserve, part, context)
    rank_bytes = -(-weights_bytes // tp) + static_bytes + floor_bytes
    if rank_bytes > context.capacity_bytes:
        hint = "use GPUs with more memory" if model.tp == "auto" else "raise its tp"
        raise TooLargeError(
            f"{model.name}: weights, engine and one request of {reserve} tokens need"
            f" {format_size(rank_bytes)} per GPU at tp {tp}, and a GPU has"
            f" {format_size(context.capacity_bytes)}; {hint}"
        )
    slo = model.slo or context.slo
    chunk = engine.prefill_chunk_tokens
    nodes = context.nodes if model.device is None else context.nodes[:1]
    fewest, most = model.replicas.bounds(model.name, nodes, tp)
    return ModelSetup(
        index=index,
        name=model.name,
        tp=tp,
        weight_bytes=weights_bytes,
        share_bytes=static_bytes,
        token_bytes=rank_token_bytes * tp,
        kv_floor_bytes=floor_bytes * tp,
        need=kv_need(kept, engine),
        slo_ttft_s=slo.ttft * context.slo_scale,
        slo_tpot_s=slo.tpot * context.slo_scale,
        parts=parts,
        prefill_tokens_per_s=chunk / part.cost.prefill_s(chunk),
        never_evict=model.never_evict or fewest > 1,
        pinned_device=model.device,
        static_share=model.static_share,
        replicas_min=fewest,
        replicas_max=most,
        context_tokens=context_tokens,
        kv_tokens=kv_tokens,
        request_s=float(engine.request) if engine.request else 0.0,
    )


def model_parts(
    tp: int, model: SimModelYaml, shape: ModelShape, context: ModelContext
) -> dict[int, DegreeSetup]:
    """Returns the setup at degree `tp` and at the usual degrees that divide its heads."""
    given = context.engine.host
    host_s = HOST_S if given is None else float(given)
    name = shape_source(model, context.folder)
    usual = (d for d in TP_DEGREES if d <= len(context.nodes) and not shape.heads % d)
    return {
        d: DegreeSetup(
            cost_model(
                context.gpu, name, d, host_s, context.cost_files, kv_dtype=model.kv_cache_dtype
            ),
            *kv_quantum(shape, d, context),
            _pooled_shape(shape, d, context.engine.block_tokens),
        )
        for d in (sorted({tp, *usual}) if shape.is_uniform else (tp,))
    }


def _pooled_shape(shape: ModelShape, tp: int, block_tokens: int) -> KvShape | None:
    if not shape.is_uniform:
        return None
    kv_heads = max(1, -(-shape.kv_heads // tp))
    return KvShape(shape.kv_layers, kv_heads, shape.kv_dim, shape.kv_dtype_bytes, block_tokens)


def kv_pools(shape: ModelShape, context_tokens: int, engine: SimEngineYaml) -> tuple[PoolNeed, ...]:
    """Returns the pools of a model, and what a request of `context_tokens` holds there."""
    main, *windows = shape.kv_groups(engine.block_tokens)
    pools = [PoolNeed("full", main.layout, context_tokens)]
    for group in windows:
        assert group.window_tokens is not None
        kept = window_kept(group.layout, group.window_tokens, engine.prefill_chunk_tokens)
        pools.append(PoolNeed("window", group.layout, min(context_tokens, kept)))
    if state_bytes := shape.state_bytes():
        pools.append(PoolNeed("state", state_layout(state_bytes), 1))
    return tuple(pools)


def kv_need(shape: ModelShape, engine: SimEngineYaml) -> KvNeed:
    """Returns the KV of requests, as the live engine reports it."""
    if shape.is_uniform:
        return KvNeed(engine.block_tokens)
    main, *others = kv_pools(shape, shape.decoder.context_tokens, engine)
    return KvNeed(engine.block_tokens, **side_need(main.layout, {p.name: p for p in others}))


def _floor_bytes(
    shape: ModelShape, reserve_tokens: int, part: DegreeSetup, context: ModelContext
) -> int:
    """Returns the KV of one request of `reserve_tokens` on a device: several pools need the slabs
    of the live engine's plan."""
    if reserve_tokens and not kv_need(shape, context.engine).is_plain:
        pools = kv_pools(shape, reserve_tokens, context.engine)
        return sum(pool.need_bytes(context.page_bytes) for pool in pools)
    blocks = -(-reserve_tokens // context.engine.block_tokens)
    return -(-blocks // part.quantum_blocks) * part.quantum_bytes


def _check_degree(model: str, tp: int, gpus: int) -> None:
    if tp < 1:
        raise ConfigError(f"{model}.tp: {tp} must be >= 1")
    if tp > gpus:
        raise TooLargeError(f"{model}.tp: needs {tp} GPUs, and the cluster has {gpus}")


def _longest_served(asked: NDArray[np.int64], fits: Callable[[int], bool]) -> tuple[int, int]:
    """Returns the most tokens of a request that `fits`, and those of the longest request that has
    no more; if none fits, of the shortest. asked: Tokens of the requests."""
    longest = int(asked.max(initial=0))
    if fits(longest) or not longest:
        return UNLIMITED_TOKENS, longest
    low, high = 0, longest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    served = asked[asked <= low]
    return low, int(served.max() if len(served) else asked.min())


def kv_quantum(shape: ModelShape, tp: int, context: ModelContext) -> tuple[int, int]:
    """Returns (KV blocks, bytes on one device) of a quantum, the smallest growth of KV memory.

    With the layout "per_layer" a quantum is a page in each of the model's K and V buffers. With
    "token_interleaved" it is the pages that hold one block. As in the live system, it is a block
    where several pools grow by different slabs, and a slab per layer where layers differ.
    """
    if not shape.is_uniform:
        main, *others = kv_pools(shape.kept_by_rank(tp), 1, context.engine)
        block_bytes = main.layout.token_bytes * context.engine.block_tokens
        slab_bytes = main.layout.quantum_bytes(context.page_bytes)
        return (1, block_bytes) if others else (slab_bytes // block_bytes, slab_bytes)
    layout, block_tokens = context.engine.kv_layout, context.engine.block_tokens
    page_bytes, buffers = context.page_bytes, shape.buffers
    block_bytes = shape.kv_token_bytes(tp) * block_tokens
    per_layer_pages = math.ceil(block_bytes / buffers / page_bytes)
    per_layer_bytes = per_layer_pages * page_bytes * buffers
    finer = layout == "auto" and per_layer_bytes * context.shared > 0.05 * context.capacity_bytes
    if layout == "per_layer" or (layout == "auto" and not finer):
        return per_layer_bytes // block_bytes, per_layer_bytes
    pages_bytes = math.ceil(block_bytes / page_bytes) * page_bytes
    return pages_bytes // block_bytes, pages_bytes


def shape_source(model: SimModelYaml, folder: Path) -> str:
    """Returns the name of a public model, or a path relative to `folder`."""
    given = model.shape or model.name
    if known_shape(given) is not None:
        return given
    path = folder / given
    return str(path) if config_file(path).is_file() or path.suffix == ".json" else given


def _shape(model: SimModelYaml, folder: Path) -> ModelShape:
    if model.kv_cache_dtype not in (AUTO, *KV_CACHE_DTYPES):
        known = ", ".join((AUTO, *KV_CACHE_DTYPES))
        raise ConfigError(f"{model.name}.kv_cache_dtype: must be one of {known}")
    try:
        shape = model_shape(shape_source(model, folder), model.kv_cache_dtype)
    except ConfigError as error:
        raise ConfigError(f"{model.name}.shape: {error}") from error
    if model.context_length is None:
        return shape
    return replace(shape, decoder=replace(shape.decoder, context_tokens=model.context_length))
