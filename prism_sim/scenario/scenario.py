"""Resolution of a `prism-sim` YAML into the input of a simulation.

Every error is one line with the key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prism.config.policy_knobs import named_policy, own_knobs
from prism.config.reader import convert, read_mapping
from prism.config.schema.cluster_config import MIGRATE_RUNNING
from prism.errors import ConfigError, TooLargeError
from prism.policies import registry
from prism.policies.baselines.adbs import AdbsSettings
from prism.policies.baselines.aegaeon import AegaeonSettings
from prism.policies.baselines.doubling_budget import DbSettings
from prism.policies.baselines.qlm import QlmSettings
from prism.policies.baselines.seallm import SeallmSettings
from prism.policies.knobs import Knobs
from prism.policies.policy import Policy
from prism.policies.static import KV_PARTS, StaticSettings
from prism.scheduler.local_scheduler import Limits
from prism_replay.trace import Trace
from prism_sim.cluster.turns.turn_pool import check_turns
from prism_sim.core.prefix import HASH_TOKENS
from prism_sim.core.setup import (
    UNBOUNDED_STEPS,
    ActivationSettings,
    ClusterSetup,
    DeviceSetup,
    EngineSettings,
)
from prism_sim.core.workload import NO_SLO, Workload, workload
from prism_sim.costs.gpus import GpuSpec
from prism_sim.placement.search import SEARCH_RATES
from prism_sim.scenario.base_slos import with_base_slos
from prism_sim.scenario.config import BaselinesYaml, SimModelYaml, SimYaml, SourceYaml
from prism_sim.scenario.gpu_files import gpu_type
from prism_sim.scenario.models import ModelContext, model_setup
from prism_sim.scenario.traces import load_trace

Overrides = Mapping[str, Any]
KV_LAYOUTS = ("per_layer", "token_interleaved", "auto")
STEPS = ("runs", "single")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Cluster, policy and workload of one simulation."""

    # The parsed YAML with the overrides applied.
    config: SimYaml
    setup: ClusterSetup
    work: Workload


def read_config(path: Path, overrides: Overrides | None = None) -> SimYaml:
    """Reads the YAML. Raises ConfigError. overrides: Dotted keys such as "gpus.count" -> value."""
    return with_changes(read_data(path), overrides or {}, path)


def read_data(path: Path) -> dict[str, Any]:
    """Returns the keys of the YAML as they are. Raises ConfigError if it cannot be read."""
    with _prefixed_errors(path):
        return read_mapping(path, "gpus: and models:", "name an existing YAML file")


def with_changes(data: dict[str, Any], overrides: Overrides, path: Path) -> SimYaml:
    """Applies the overrides to the file's keys in `data`, and returns the parsed result. Raises
    ConfigError. path: Used in messages."""
    with _prefixed_errors(path):
        for key, value in overrides.items():
            _put(data, key, value)
        return convert(data, SimYaml)


def load(path: Path, overrides: Overrides | None = None) -> Scenario:
    """Reads, checks and resolves the file. Raises ConfigError or TraceError."""
    return resolve(read_config(path, overrides), path)


def resolve(config: SimYaml, path: Path, rows: Trace | None = None) -> Scenario:
    """Checks and resolves a parsed YAML. Raises ConfigError or TraceError.

    Args:
        path: Path of the YAML, for messages and relative paths.
        rows: Requests that replace the file in `config.trace`.
    """
    check(config, path)
    with _prefixed_errors(path):
        models = expand(config.models)
        work = _workload(config, models, path.parent, rows)
        setup = cluster_setup(config, models, work, path.parent)
        if config.base_slos:
            plain = msgspec.structs.replace(config, rate_scale=1.0)
            base = work
            if config.rate_scale != 1.0:
                base = _workload(plain, models, path.parent, rows)
            setup = with_base_slos(setup, work, base, config.slo_scale)
        return Scenario(config, setup, work)


def check(config: SimYaml, path: Path) -> None:
    """Runs the checks that need neither the trace nor the shapes of models. Raises ConfigError."""
    with _prefixed_errors(path):
        _check(config)


@contextmanager
def _prefixed_errors(path: Path) -> Iterator[None]:
    """Prefixes errors with the file's path."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{path}: {error}") from error


def _workload(
    config: SimYaml, models: list[SimModelYaml], folder: Path, rows: Trace | None
) -> Workload:
    names = {model.name: i for i, model in enumerate(models)}
    trace = load_trace(config, models, folder, rows)
    work = workload(trace, names, config.slo_scale, config.trace or "generate")
    _fill_slos(work, config, models)
    return work


def expand(models: list[SimModelYaml]) -> list[SimModelYaml]:
    """Returns the models with each `count` expanded. Raises ConfigError for a duplicate name."""
    found: dict[str, SimModelYaml] = {}
    for number, model in enumerate(models):
        if model.count < 1:
            raise ConfigError(f"models[{number}].count: {model.count} must be >= 1")
        for copy in range(model.count):
            name = model.name if model.count == 1 else f"{model.name}-{copy}"
            if name in found:
                raise ConfigError(f"models[{number}].name: {name!r} is given twice; rename one")
            shape = model.shape or model.name
            found[name] = msgspec.structs.replace(model, name=name, shape=shape, count=1)
    return list(found.values())


def cluster_setup(
    config: SimYaml, models: list[SimModelYaml], work: Workload, folder: Path
) -> ClusterSetup:
    """Returns the resolved cluster. Raises ConfigError. folder: Start of relative paths."""
    gpu = gpu_type(config.gpus.type, [folder / name for name in config.gpu_files])
    devices = _devices(config, gpu)
    page_bytes, capacity_bytes = devices[0].page_bytes, devices[0].capacity_bytes
    context = ModelContext(
        gpu=gpu,
        folder=folder,
        engine=config.engine,
        page_bytes=page_bytes,
        capacity_bytes=capacity_bytes,
        nodes=tuple(device.node for device in devices),
        shared=-(-len(models) // len(devices)),
        slo=config.slo,
        slo_scale=config.slo_scale,
        cost_files=tuple(folder / name for name in config.cost_files),
    )
    tokens = work.request_tokens()
    scheduler, engine = config.scheduler, config.engine
    return ClusterSetup(
        devices=devices,
        models=tuple(model_setup(i, m, tokens[i], context) for i, m in enumerate(models)),
        policy=config.policy,
        settings=scheduler.settings(),
        limits=Limits(
            headroom_tokens=engine.headroom_tokens,
            prefill_chunk_tokens=engine.prefill_chunk_tokens,
        ),
        engine=EngineSettings(
            max_running=engine.max_running,
            prefill_chunk_tokens=engine.prefill_chunk_tokens,
            mixed_chunk=engine.mixed_chunk,
            headroom_tokens=engine.headroom_tokens,
            run_steps=1 if config.steps == "single" else UNBOUNDED_STEPS,
            prefix_reuse=engine.prefix_reuse,
        ),
        activation=_activation(config),
        interval_s=float(scheduler.interval_s),
        rate_window_s=float(scheduler.rate_window_s),
        warm=config.activation.warm_start,
        search_requests=config.search_requests,
        search_rates=config.baselines.search_rates,
        knobs=_knobs(config),
        patience_s=float(config.patience),
        search_interval_s=float(config.scheduler.search_interval_s or math.inf),
    )


def _devices(config: SimYaml, gpu: GpuSpec) -> tuple[DeviceSetup, ...]:
    gpus = config.gpus
    memory_bytes = int(gpus.memory) if gpus.memory else gpu.memory_bytes
    page_bytes = int(gpus.page)
    capacity_bytes = int(memory_bytes * gpus.memory_fraction) // page_bytes * page_bytes
    nodes = [f"node{i * gpus.nodes // gpus.count}" for i in range(gpus.count)]
    return tuple(
        DeviceSetup(f"gpu:{i}", node, capacity_bytes, page_bytes, gpus.engines)
        for i, node in enumerate(nodes)
    )


def _activation(config: SimYaml) -> ActivationSettings:
    given = config.activation
    return ActivationSettings(
        layout_s=float(given.layout),
        restart_s=float(given.restart),
        load_bytes_s=int(given.load_rate),
        node_load_bytes_s=int(given.node_load_rate),
        plain_load_bytes_s=int(given.plain_load_rate),
        peer_bytes_s=int(given.peer_rate),
        network_bytes_s=int(config.gpus.network_rate),
        host_store_bytes=int(given.host_store) if given.host_store else None,
        disk_bytes_s=int(given.disk_rate),
        weights_everywhere=given.weights_everywhere,
    )


def _knobs(config: SimYaml) -> Knobs:
    given = config.baselines
    adapt_s = float(given.muxserve_adapt)
    return Knobs(
        static=StaticSettings(given.static_kv),
        qlm=QlmSettings(group_requests_max=given.qlm_group),
        adbs=AdbsSettings(prefill_sm_min=given.muxserve_prefill, adapt_every_s=adapt_s),
        seallm=SeallmSettings(services_max=given.seallm_services),
        aegaeon=AegaeonSettings(prefill_part=given.aegaeon_prefill),
        budgets=DbSettings(starvation_factor=given.seallm_starvation),
        own=own_knobs(config.policy, config.knobs),
    )


def _check(config: SimYaml) -> None:
    """Raises ConfigError for values that are invalid for any trace and model."""
    policy = named_policy(config.policy)
    registry.with_knobs(policy, own_knobs(config.policy, config.knobs))
    gpus, engine = config.gpus, config.engine
    if not config.models:
        raise ConfigError("models: add at least one model")
    _check_models(config.models)
    _check_trace(config)
    if not 1 <= gpus.nodes <= gpus.count:
        raise ConfigError(
            f"gpus.count: {gpus.count} GPUs on {gpus.nodes} nodes; each node needs at least one GPU"
        )
    if not 0 < gpus.memory_fraction <= 1 or gpus.engines < 1:
        raise ConfigError("gpus.memory_fraction must be in (0, 1], gpus.engines at least 1")
    for key, value in (("rate_scale", config.rate_scale), ("slo_scale", config.slo_scale)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{key}: {value:g} must be > 0 and finite")
    for key, number, least in (
        ("seed", config.seed, 0),
        ("engine.max_running", engine.max_running, 1),
        ("engine.prefill_chunk_tokens", engine.prefill_chunk_tokens, 1),
        ("engine.block_tokens", engine.block_tokens, 1),
        ("engine.headroom_tokens", engine.headroom_tokens, 0),
        ("search_requests", config.search_requests, 1),
        ("scheduler.migration_threshold", config.scheduler.migration_threshold, 0),
        ("scheduler.contended_requests", config.scheduler.contended_requests, 0),
    ):
        if number < least:
            raise ConfigError(f"{key}: {number} must be >= {least}")
    if engine.prefix_reuse:
        _check_prefix_reuse(config)
    if config.activation.host_store is not None:
        _check_host_store(config)
    _check_baselines(config.baselines)
    for key, given, known in (
        ("baselines.search_rates", config.baselines.search_rates, SEARCH_RATES),
        ("baselines.static_kv", config.baselines.static_kv, KV_PARTS),
        ("engine.kv_layout", engine.kv_layout, KV_LAYOUTS),
        ("scheduler.migrate_running", config.scheduler.migrate_running, MIGRATE_RUNNING),
        ("steps", config.steps, STEPS),
    ):
        if given not in known:
            raise ConfigError(f"{key}: {given!r} is not one of {', '.join(known)}")
    _check_turns(config, policy)
    _check_pins(config, policy)


def _check_pins(config: SimYaml, policy: Policy) -> None:
    """Raises ConfigError for a `device` that is not valid or that the policy does not support,
    TooLargeError if it needs more GPUs."""
    # Searches do not get pins as input, and with turns no model is bound to a device.
    supports_pins = policy.search is None and policy.turns is None
    gpus = [f"gpu:{i}" for i in range(config.gpus.count)]
    for index, model in enumerate(config.models):
        if model.device is None:
            continue
        key = f"models[{index}].device"
        if not supports_pins:
            raise ConfigError(
                f"{key}: cannot be combined with policy {config.policy!r}; remove the key or use"
                " another policy"
            )
        if model.tp not in (1, "auto"):
            raise ConfigError(f"{key}: cannot be combined with tp {model.tp}; remove the key")
        if model.device not in gpus:
            kind = TooLargeError if re.fullmatch(r"gpu:\d+", model.device) else ConfigError
            known = gpus[0] if len(gpus) == 1 else f"{gpus[0]} to {gpus[-1]}"
            raise kind(f"{key}: {model.device!r} does not exist; the GPUs are {known}")


def _check_turns(config: SimYaml, policy: Policy) -> None:
    if policy.turns is not None:
        degrees = {1 if model.tp == "auto" else model.tp for model in config.models}
        reuse = config.engine.prefix_reuse
        check_turns(config.policy, config.gpus.count, degrees, prefix_reuse=reuse)


def _check_models(models: list[SimModelYaml]) -> None:
    for number, model in enumerate(models):
        key, share, reserve = f"models[{number}]", model.static_share, model.kv_reserve_tokens
        if not model.name:
            raise ConfigError(f"{key}.name: must not be empty")
        if share is not None and not 0 < share <= 1:
            raise ConfigError(f"{key}.static_share: {share} is not in (0, 1]; write 0.5")
        if reserve is not None and reserve < 0:
            raise ConfigError(f"{key}.kv_reserve_tokens: {reserve} must be >= 0")
        if model.context_length is not None and model.context_length < 1:
            raise ConfigError(f"{key}.context_length: {model.context_length} must be >= 1")


def _check_trace(config: SimYaml) -> None:
    if (config.trace is None) == (config.generate is None):
        raise ConfigError("trace: set either trace: FILE or generate:")
    if config.generate is not None and config.source != SourceYaml():
        raise ConfigError("source: cannot be combined with generate:; remove one of them")


def _check_baselines(given: BaselinesYaml) -> None:
    if min(given.qlm_group, given.seallm_services) < 1:
        raise ConfigError("baselines.qlm_group and seallm_services: must be >= 1")
    if not 0 < given.aegaeon_prefill < 1:
        raise ConfigError("baselines.aegaeon_prefill: must be between 0 and 1")
    if not 0 < given.muxserve_prefill <= 1 or not given.seallm_starvation > 0:
        raise ConfigError("baselines.muxserve_prefill must be in (0, 1], seallm_starvation > 0")


def _check_prefix_reuse(config: SimYaml) -> None:
    if HASH_TOKENS % config.engine.block_tokens:
        raise ConfigError(
            f"engine.block_tokens: with engine.prefix_reuse, {config.engine.block_tokens} must"
            f" divide the {HASH_TOKENS} tokens of a hash_ids block"
        )
    if registry.get(config.policy).steps is not None:
        raise ConfigError(
            f"engine.prefix_reuse: cannot be combined with policy {config.policy!r}, which computes"
            " whole prompts; use another policy or set it to false"
        )


def _check_host_store(config: SimYaml) -> None:
    if not config.activation.weights_everywhere:
        raise ConfigError(
            "activation.weights_everywhere: false cannot be combined with host_store, where every"
            " node's disk has all weights; remove it"
        )
    if min(config.activation.disk_rate, config.gpus.network_rate) < 1:
        raise ConfigError("activation.disk_rate, gpus.network_rate: must be >= 1 byte/s")
    policy = registry.get(config.policy)
    if policy.asks_startup or policy.assign is not None or policy.turns is not None:
        raise ConfigError(
            f"activation.host_store: cannot be combined with policy {config.policy!r}, which"
            " assumes all weights in host memory; use another policy or remove it"
        )


def _fill_slos(work: Workload, config: SimYaml, models: list[SimModelYaml]) -> None:
    """Fills missing SLOs of requests, and all SLOs of a generated trace, with their model's at the
    SLO scale. A missing end-to-end SLO follows from the other two if the model has none."""
    fill_all = config.trace is None
    found = []
    for model in models:
        slo = model.slo or config.slo
        ttft_s = slo.ttft * config.slo_scale
        tpot_s = slo.tpot * config.slo_scale
        e2e_s = NO_SLO
        if slo.e2e is not None:
            e2e_s = slo.e2e * config.slo_scale
        found.append((ttft_s, tpot_s, e2e_s))
    for i, model_index in enumerate(work.model):
        ttft_s, tpot_s, e2e_s = found[model_index]
        if fill_all or work.slo_ttft_s[i] == NO_SLO:
            work.slo_ttft_s[i] = ttft_s
        if fill_all or work.slo_tpot_s[i] == NO_SLO:
            work.slo_tpot_s[i] = tpot_s
        if fill_all or work.slo_e2e_s[i] == NO_SLO:
            parts_s = work.slo_ttft_s[i] + work.slo_tpot_s[i] * (work.output_tokens[i] - 1)
            work.slo_e2e_s[i] = parts_s if e2e_s == NO_SLO else e2e_s


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key. Raises ConfigError if a parent of the key is not a mapping."""
    *path, last = key.split(".")
    for name in path:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{key}: {name} is not a mapping in this file; change it in the YAML")
    data[last] = value
