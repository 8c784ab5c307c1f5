"""Simulation setup of a live configuration: its devices, engines, policy and limits."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from prism.config.checks.memory_needs import layout_of, pools_of, shard_of, side_need
from prism.config.policy_knobs import own_knobs
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig
from prism.config.schema.endpoints import node_of
from prism.config.schema.machines import is_gpu
from prism.messages.model_spec import ModelSpec
from prism.policies.knobs import Knobs
from prism.policies.multiplexing.kv_blocks import KvShape
from prism.scheduler.local_scheduler import Limits
from prism_sim.core.setup import (
    ClusterSetup,
    DegreeSetup,
    DeviceSetup,
    EngineSettings,
    KvNeed,
    ModelSetup,
)
from prism_sim.costs.model import CostModel, GpuUsage, PromptChunk

MIXED = ("fake",)
"""Adapters with engines that compute prompts and decodes in one step."""
SLEEPING = ("fake",)
"""Adapters with steps that use no core."""


class HostCost:
    """Cost model with steps that use one of `cores`, since engines compute with one thread."""

    def __init__(self, cost: CostModel, cores: float) -> None:
        self._cost = cost
        self._share = GpuUsage(1.0 / cores, 1.0 / cores)
        self.step_s = cost.step_s
        self.prefill_s = cost.prefill_s
        self.decode_s = cost.decode_s
        self.decode_run_s = cost.decode_run_s
        self.decode_steps = cost.decode_steps

    def usage(self, chunks: Sequence[PromptChunk], batch: int, context_tokens: int) -> GpuUsage:
        return self._share if chunks or batch else GpuUsage(0.0, 0.0)


def cores_of(config: ClusterConfig) -> float:
    """Returns the number of cores for engines of host devices: all cores of this process."""
    if config.engine.adapter in SLEEPING:
        return math.inf
    return float(len(os.sched_getaffinity(0)))


def is_on_host(config: ClusterConfig) -> bool:
    """Returns True if all devices are host devices."""
    return all(_is_host(device) for device in config.devices)


def cluster_setup(
    config: ClusterConfig, devices: Sequence[DeviceSetup], models: Sequence[ModelSetup]
) -> ClusterSetup:
    """Returns the setup with the configuration's policy, settings and engines."""
    scheduler, engine = config.scheduler, config.engine
    return ClusterSetup(
        devices=tuple(devices),
        models=tuple(models),
        policy=config.policy,
        knobs=Knobs(own=own_knobs(config.policy, config.knobs)),
        settings=scheduler.settings(),
        limits=Limits(prefill_chunk_tokens=engine.prefill_chunk_tokens),
        engine=EngineSettings(
            max_running=engine.max_running,
            prefill_chunk_tokens=engine.prefill_chunk_tokens,
            mixed_chunk=engine.adapter in MIXED,
            serial_phases=True,
        ),
        interval_s=scheduler.interval_s,
        rate_window_s=scheduler.rate_window_s,
    )


def device_setup(device: DeviceConfig) -> DeviceSetup:
    """Returns a device. Host devices of a machine share its cores."""
    return DeviceSetup(
        device.name,
        device.node,
        device.capacity_bytes,
        device.page_bytes,
        device.engines,
        processor=f"host {node_of(device.name)}".rstrip() if _is_host(device) else "",
    )


def _is_host(device: DeviceConfig) -> bool:
    return not is_gpu(device.name)


def model_setup(
    index: int, spec: ModelSpec, parts: dict[int, DegreeSetup], config: ClusterConfig
) -> ModelSetup:
    """Returns a model with the weights of its specification. The KV floor and the engine's share
    are left at 0."""
    chunk = config.engine.prefill_chunk_tokens
    main, *others = pools_of(spec, chunk)
    return ModelSetup(
        index=index,
        name=spec.name,
        tp=spec.tp,
        weight_bytes=spec.weight_bytes,
        token_bytes=spec.token_bytes,
        kv_floor_bytes=0,
        need=KvNeed(
            spec.block_tokens, **side_need(main.layout, {pool.name: pool for pool in others})
        ),
        slo_ttft_s=spec.slo_ttft_s,
        slo_tpot_s=spec.slo_tpot_s,
        parts=parts,
        prefill_tokens_per_s=chunk / parts[spec.tp].cost.prefill_s(chunk),
        never_evict=spec.never_evict,
        pinned_device=spec.pinned_device,
        static_share=spec.static_share,
        replicas_min=spec.replicas_min,
        replicas_max=spec.replicas_max,
        context_tokens=spec.context_length,
    )


def degree_setup(spec: ModelSpec, tp: int, cost: CostModel, page_bytes: int) -> DegreeSetup:
    """Returns a model at a degree, with the quantum of the main pool on devices of these pages."""
    layout = layout_of(shard_of(spec, tp) if tp > 1 else spec)
    blocks = layout.slab_tokens(page_bytes) // spec.block_tokens
    return DegreeSetup(cost, blocks, layout.quantum_bytes(page_bytes), kv_shape(spec, tp))


def kv_shape(spec: ModelSpec, tp: int) -> KvShape | None:
    """Returns the KV on one of `tp` devices, None if layers keep different KV."""
    if not spec.is_plain:
        return None
    heads = max(1, spec.num_kv_heads // tp)
    return KvShape(spec.num_layers, heads, spec.head_dim, 2, spec.block_tokens)
