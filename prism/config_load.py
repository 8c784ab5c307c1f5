"""From the user's YAML to a checked `ClusterConfig`. Runs once, before anything is started."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from math import ceil
from pathlib import Path

import msgspec

from prism import journal
from prism.config import (
    AUTO_STORE,
    MIGRATE_RUNNING,
    ClusterConfig,
    DeviceConfig,
    DeviceYaml,
    EngineConfig,
    EngineYaml,
    FrontendConfig,
    FrontendYaml,
    JournalConfig,
    JournalYaml,
    ModelYaml,
    SchedulerConfig,
    SchedulerYaml,
    ServeYaml,
)
from prism.config_yaml import read_yaml
from prism.errors import ConfigError
from prism.messages import ModelSpec
from prism.model_memory import KV_LAYOUTS, MemoryNeed, arranged, memory_need
from prism.model_spec import DTYPE_BYTES, ModelFiles, inspect_model
from prism.policies import registry
from prism.units import format_size, parse_size, parse_time

ADAPTERS = ("sglang", "fake")
_DEVICE_NAME = re.compile(r"(host|cuda):\d{1,4}")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.:@+/-]*")
_PAGE_GRAIN_BYTES = 4096
_ENGINES_MAX = 64


def load(path: Path) -> ClusterConfig:
    """The checked configuration; namespace and run_dir are empty for the launcher to fill in,
    and redis_url is empty where the bundled server is to be used.

    Raises ConfigError: one line "<file>: <key>: what is wrong; what to change".
    """
    try:
        return _resolve(read_yaml(path), path.resolve().parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _resolve(data: ServeYaml, base_dir: Path) -> ClusterConfig:
    registry.live(data.policy)
    devices = [_device(d, f"devices[{i}]") for i, d in enumerate(data.devices)]
    on_gpus = all(device.name.startswith("cuda:") for device in devices)
    models = [
        _model(m, f"models[{i}]", base_dir, on_gpus=on_gpus) for i, m in enumerate(data.models)
    ]
    config = ClusterConfig(
        namespace="",
        run_dir="",
        redis_url=_redis_url(data.redis),
        policy=data.policy,
        devices=devices,
        models=models,
        host=data.frontend.host,
        port=data.frontend.port,
        scheduler=_scheduler(data.scheduler),
        engine=_engine(data.engine, base_dir),
        frontend=_frontend(data.frontend),
        journal=_journal(data.journal),
    )
    _check_names(config)
    _one_of(data.engine.kv_layout, tuple(KV_LAYOUTS), "engine.kv_layout")
    for index, model in enumerate(models):
        _check_spread(model, f"models[{index}]")
    models = [_arranged(model, config, data.engine.kv_layout) for model in models]
    config = msgspec.structs.replace(config, models=models)
    _check_memory(config)
    _check_shares(config)
    _check_adapter(config)
    return config


def _check_adapter(config: ClusterConfig) -> None:
    adapter = importlib.import_module(f"prism.engines.{config.engine.adapter}")
    for index, device in enumerate(config.devices):
        if missing := adapter.lacks(device.name):
            raise ConfigError(f"devices[{index}].name: {missing}")


def _check_spread(model: ModelSpec, key: str) -> None:
    if model.tp == 1:
        return
    if model.pinned_device is not None:
        raise ConfigError(f"{key}.device: with tp {model.tp} there are several; leave the key out")
    if model.num_kv_heads % model.tp:
        raise ConfigError(
            f"{key}.tp: {model.num_kv_heads} KV heads cannot be shared by {model.tp} devices;"
            " choose a divisor"
        )


def _arranged(model: ModelSpec, config: ClusterConfig, kv_layout: str) -> ModelSpec:
    """Ranks keep their part of the heads per layer, whatever is asked for."""
    return arranged(model, config, KV_LAYOUTS["per_layer" if model.tp > 1 else kv_layout])


def _check_shares(config: ClusterConfig) -> None:
    divided = [device.name for device in config.devices if device.sm_percent]
    if divided and not config.engine.mps:
        raise ConfigError(
            f"devices: {divided[0]} has sm_percent, which only MPS can give; set engine.mps: true"
        )


def _one_of(value: str, known: tuple[str, ...], key: str) -> None:
    if value not in known:
        raise ConfigError(f"{key}: unknown value {value!r}; choose one of {', '.join(known)}")


def _at_least(value: float, least: float, key: str) -> None:
    if not value >= least:
        raise ConfigError(f"{key}: {value} is too small; give at least {least}")


def _redis_url(url: str | None) -> str:
    if url and not url.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError(
            "redis: is not a Redis URL; write redis://host:port, or leave the key out to use the"
            " bundled server"
        )
    return url or ""


def _device(data: DeviceYaml, key: str) -> DeviceConfig:
    if not _DEVICE_NAME.fullmatch(data.name):
        raise ConfigError(
            f"{key}.name: {data.name!r} is no device; use host:0, host:1, ... or cuda:0, ..."
        )
    page_bytes = parse_size(data.page, f"{key}.page")
    if page_bytes % _PAGE_GRAIN_BYTES or page_bytes & (page_bytes - 1):
        raise ConfigError(
            f"{key}.page: {data.page} is not a power of two of at least 4KiB; use 64KiB or 2MiB"
        )
    capacity_bytes = parse_size(data.capacity, f"{key}.capacity")
    if capacity_bytes < page_bytes:
        raise ConfigError(
            f"{key}.capacity: {data.capacity} is below one page ({data.page}); raise capacity or"
            f" lower {key}.page"
        )
    if not 1 <= data.engines <= _ENGINES_MAX:
        raise ConfigError(f"{key}.engines: {data.engines} is out of range; choose 1 to 64")
    whole = capacity_bytes - capacity_bytes % page_bytes
    shares = _sm_percent(data, f"{key}.sm_percent")
    return DeviceConfig(data.name, whole, page_bytes, data.engines, sm_percent=shares)


def _sm_percent(data: DeviceYaml, key: str) -> tuple[int, ...]:
    shares = tuple(data.sm_percent or ())
    if shares and len(shares) != data.engines:
        raise ConfigError(f"{key}: {len(shares)} numbers for {data.engines} engines; give each one")
    wrong = [share for share in shares if not 1 <= share <= 100]
    if wrong:
        raise ConfigError(f"{key}: {wrong[0]} is no part of a GPU in percent; choose 1 to 100")
    return shares


def _frontend(data: FrontendYaml) -> FrontendConfig:
    if not 0 <= data.port <= 65535:
        raise ConfigError(
            f"frontend.port: {data.port} is no port; choose 1 to 65535, or 0 for any free one"
        )
    _at_least(data.max_open_requests, 1, "frontend.max_open_requests")
    return FrontendConfig(
        max_open_requests=data.max_open_requests,
        progress_timeout_s=parse_time(data.progress_timeout, "frontend.progress_timeout"),
        refused_timeout_s=parse_time(data.refused_timeout, "frontend.refused_timeout"),
    )


def _journal(data: JournalYaml) -> JournalConfig:
    _one_of(data.keep, journal.KEPT, "journal.keep")
    return JournalConfig(data.keep, parse_size(data.max, "journal.max"))


def _scheduler(data: SchedulerYaml) -> SchedulerConfig:
    _at_least(data.migration_threshold, 0, "scheduler.migration_threshold")
    _at_least(data.contended_requests, 0, "scheduler.contended_requests")
    _one_of(data.migrate_running, MIGRATE_RUNNING, "scheduler.migrate_running")
    return SchedulerConfig(
        interval_s=parse_time(data.interval, "scheduler.interval"),
        idle_threshold_s=parse_time(data.idle_threshold, "scheduler.idle_threshold"),
        min_idle_s=parse_time(data.min_idle, "scheduler.min_idle"),
        migration_threshold=data.migration_threshold,
        contended_requests=data.contended_requests,
        rate_window_s=parse_time(data.rate_window, "scheduler.rate_window"),
        move_running=data.migrate_running == "move",
    )


def _engine(data: EngineYaml, base_dir: Path) -> EngineConfig:
    _one_of(data.adapter, ADAPTERS, "engine.adapter")
    _one_of(data.weight_links, ("node", "own"), "engine.weight_links")
    _at_least(data.max_running, 1, "engine.max_running")
    _at_least(data.prefill_chunk_tokens, 1, "engine.prefill_chunk_tokens")
    return EngineConfig(
        adapter=data.adapter,
        max_running=data.max_running,
        static_bytes=parse_size(data.static, "engine.static"),
        prefill_chunk_tokens=data.prefill_chunk_tokens,
        drain_timeout_s=parse_time(data.drain_timeout, "engine.drain_timeout"),
        weight_store=_weight_store(data.weight_store, base_dir),
        weight_store_bytes=_optional_size(data.weight_store_max, "engine.weight_store_max"),
        load_bytes_per_s=_optional_size(data.load_rate, "engine.load_rate"),
        weight_links=data.weight_links,
        link_bytes=parse_size(data.link_memory, "engine.link_memory"),
        links_from_bytes=parse_size(data.links_from, "engine.links_from"),
        mps=data.mps,
    )


def _weight_store(wanted: str, base_dir: Path) -> str:
    """ "" means none."""
    if wanted in ("off", ""):
        return ""
    return wanted if wanted == AUTO_STORE else str((base_dir / Path(wanted).expanduser()).resolve())


def _optional_size(text: str | None, key: str) -> int | None:
    return None if text is None else parse_size(text, key)


def _model(data: ModelYaml, key: str, base_dir: Path, *, on_gpus: bool) -> ModelSpec:
    _check_model_values(data, key)
    path = (base_dir / Path(data.path).expanduser()).resolve()
    files = inspect_model(path, f"{key}.path")
    # CPU kernels of half precision are slow and less exact: host devices serve in float32.
    auto = files.stored_dtype if on_gpus else "float32"
    dtype = auto if data.dtype == "auto" else data.dtype
    return ModelSpec(
        name=data.name,
        path=str(path),
        architecture=files.architecture,
        dtype=dtype,
        kv_dtype=dtype,
        context_length=_context(data, files),
        num_layers=files.num_layers,
        num_kv_heads=files.num_kv_heads,
        head_dim=files.head_dim,
        weight_bytes=files.weight_bytes(dtype),
        token_bytes=files.token_bytes(dtype),
        slo_ttft_s=parse_time(data.slo.ttft, f"{key}.slo.ttft"),
        slo_tpot_s=parse_time(data.slo.tpot, f"{key}.slo.tpot"),
        never_evict=data.never_evict,
        pinned_device=data.device,
        static_share=data.static_share,
        tp=data.tp,
    )


def _check_model_values(data: ModelYaml, key: str) -> None:
    if not _MODEL_NAME.fullmatch(data.name):
        raise ConfigError(
            f"{key}.name: {data.name!r} cannot be used; write letters, digits and . _ - : / @ +"
        )
    _one_of(data.dtype, ("auto", *DTYPE_BYTES), f"{key}.dtype")
    if data.context_length is not None:
        _at_least(data.context_length, 1, f"{key}.context_length")
    _at_least(data.tp, 1, f"{key}.tp")
    if data.static_share is not None and not 0 < data.static_share <= 1:
        raise ConfigError(f"{key}.static_share: {data.static_share} is not in (0, 1]; write 0.5")


def _context(data: ModelYaml, files: ModelFiles) -> int:
    return min(data.context_length or files.context_length, files.context_length)


def _check_names(config: ClusterConfig) -> None:
    devices = [d.name for d in config.devices]
    models = [m.name for m in config.models]
    for key, names in (("devices", devices), ("models", models)):
        if not names:
            raise ConfigError(f"{key}: the list is empty; add at least one entry")
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ConfigError(f"{key}[{index}].name: {name!r} is used twice; rename one")
    for index, model in enumerate(config.models):
        if model.pinned_device is not None and model.pinned_device not in devices:
            raise ConfigError(
                f"models[{index}].device: unknown device {model.pinned_device!r}; choose one of"
                f" {', '.join(devices)}"
            )


def _check_memory(config: ClusterConfig) -> None:
    for index, device in enumerate(config.devices):
        needs = [
            (memory_need(m, device, config.engine), i)
            for i, m in enumerate(config.models)
            if m.pinned_device in (None, device.name)
        ]
        if needs and all(need.total_bytes > device.capacity_bytes for need, _ in needs):
            _refuse_device(config, index, *min(needs, key=lambda pair: pair[0].total_bytes))
    for index in range(len(config.models)):
        _check_model_fits(config, index)


def _refuse_device(config: ClusterConfig, index: int, need: MemoryNeed, model: int) -> None:
    device, spec = config.devices[index], config.models[model]
    raise ConfigError(
        f"devices[{index}].capacity: {format_size(device.capacity_bytes)} is too small for any"
        f" model; {spec.name} needs {_explain(need, spec)}; raise capacity to"
        f" {_enough(need)} or lower models[{model}].context_length"
    )


def _check_model_fits(config: ClusterConfig, index: int) -> None:
    spec = config.models[index]
    allowed = [(i, d) for i, d in enumerate(config.devices) if spec.pinned_device in (None, d.name)]
    best, device = max(allowed, key=lambda pair: pair[1].capacity_bytes)
    need = memory_need(spec, device, config.engine)
    if spec.tp > 1:
        _check_parts_fit(config, index, need)
    elif need.total_bytes > device.capacity_bytes:
        raise ConfigError(
            f"models[{index}]: {spec.name} needs {_explain(need, spec)} and {device.name} has"
            f" {format_size(device.capacity_bytes)}; raise devices[{best}].capacity to"
            f" {_enough(need)} or lower models[{index}].context_length"
        )


def _check_parts_fit(config: ClusterConfig, index: int, need: MemoryNeed) -> None:
    spec, engine = config.models[index], config.engine
    fitting = Counter(
        device.node
        for device in config.devices
        if memory_need(spec, device, engine).total_bytes <= device.capacity_bytes
    )
    most = max(fitting.values(), default=0)
    if most < spec.tp:
        raise ConfigError(
            f"models[{index}].tp: {spec.name} needs {_explain(need, spec)} on each of {spec.tp}"
            f" devices of one kind and page size, and {most} have that; raise their capacity to"
            f" {_enough(need)}, add devices or lower tp"
        )


def _enough(need: MemoryNeed) -> str:
    """A size to copy into the YAML, never rounded down."""
    return f"{ceil(need.total_bytes / 2**20)}MiB"


def _explain(need: MemoryNeed, spec: ModelSpec) -> str:
    return (
        f"{format_size(need.total_bytes)} (weights {format_size(need.weight_bytes)}, fixed share"
        f" {format_size(need.static_bytes)}, KV of one {spec.context_length}-token request"
        f" {format_size(need.kv_bytes)})"
    )
