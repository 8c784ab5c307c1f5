"""Resolution of the user's YAML to a checked `ClusterConfig`, once, before anything is started."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from prism.config.api_keys import read_keys, variable_keys
from prism.config.checks.adapters import (
    adapter_named,
    adapter_names,
    check_degree,
    check_loadable,
    check_parsers,
    with_engine_needs,
    with_layout,
)
from prism.config.checks.capacities import with_sizes
from prism.config.checks.embedding_models import embedding_of
from prism.config.checks.external_models import split_external
from prism.config.checks.image_models import image_spec, takes_images
from prism.config.checks.kv_cache import AUTO, KV_CACHE_DTYPES, check_attention, kv_cache_dtype
from prism.config.checks.memory_needs import (
    KV_LAYOUTS,
    TP_DEGREES,
    EngineTraits,
    check_memory,
    spread_over,
    undivided,
)
from prism.config.checks.model_paths import (
    OfHub,
    absolute,
    check_folder,
    folder_of,
    hub_name_of,
)
from prism.config.checks.names import check_model_names, check_names
from prism.config.checks.nodes import FRONTENDS_MAX, cluster_key_of, devices_of, nodes_of
from prism.config.checks.quantized_weights import check_options, check_quantization
from prism.config.policy_knobs import live_policy
from prism.config.reader import read_yaml
from prism.config.schema.access import ApiKey, check_origins
from prism.config.schema.admin import admin_address
from prism.config.schema.cluster_config import (
    ATTENTION_BACKENDS,
    AUTO_STORE,
    CUDA_GRAPHS,
    MIGRATE_RUNNING,
    ClusterConfig,
    EngineConfig,
    FrontendConfig,
    ModelYaml,
    SchedulerConfig,
    ServeYaml,
)
from prism.config.schema.image_limits import ImagesConfig
from prism.config.schema.journal import JournalYaml
from prism.config.schema.lora import lora_spec
from prism.config.schema.machines import is_gpu
from prism.errors import ConfigError
from prism.messages.external import ExternalModel
from prism.messages.model_spec import ExpectedLoad, ModelSpec
from prism.models.files import DTYPE_BYTES, ModelFiles, inspect_model
from prism.models.hub.hub_model import cached
from prism.policies import registry
from prism.scheduler import decision_journal
from prism.scheduler.decision_journal import JournalConfig
from prism.transport import ENGINE_MESSAGE_BYTES_MAX

# Healthy loops may wait up to 10 s for a device's ledger.
HANG_LEAST_S = 15


def load(
    path: Path,
    known: Sequence[ApiKey] | None = None,
    node: str = "",
    of_hub: OfHub = cached,
    capacities: Mapping[str, int] = MappingProxyType({}),
) -> ClusterConfig:
    """Returns the checked configuration.

    The launcher fills in namespace and run_dir, and redis_url if the bundled server is used.
    Raises ConfigError: one line "<file>: <key>: what is wrong; what to change". `of_hub` may raise
    ModelSourceError.

    Args:
        path: The YAML.
        known: Keys that the environment had at the start. None: the environment is read.
        node: Node that this machine is, if there are several.
        of_hub: Returns the folder of a model by its name in a hub. By default, models that were
            not downloaded before are an error.
        capacities: Sizes of devices of a running cluster, for those that the YAML gives as a part
            of their memory.
    """
    try:
        data = read_yaml(path)
        given = data.devices
        if data.ray is None:
            data = msgspec.structs.replace(data, devices=with_sizes(given, capacities))
        keys = variable_keys(data.access.keys_variable) if known is None else known
        return _resolve(data, path.absolute(), keys, node, of_hub)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _resolve(
    data: ServeYaml, source: Path, variable: Sequence[ApiKey], node: str, of_hub: OfHub
) -> ClusterConfig:
    base_dir = source.resolve().parent
    data, external = split_external(data)
    _check_policy(data)
    _check_frontend(data.frontend)
    _check_scheduler(data.scheduler)
    _at_least(data.hang_timeout, HANG_LEAST_S, "hang_timeout")
    devices = devices_of(data)
    on_gpus = all(is_gpu(device.name) for device in devices)
    engine = _engine(data.engine, base_dir)
    for i, m in enumerate(data.models):  # all of them, before a model is downloaded
        _check_model_values(m, f"models[{i}]", base_dir)
    read = partial(_model, base_dir=base_dir, engine=engine, of_hub=of_hub, on_gpus=on_gpus)
    rows = [m if m.tp else msgspec.structs.replace(m, tp=_default_tp(on_gpus)) for m in data.models]
    models = [read(m, f"models[{i}]", _first(m)) for i, m in enumerate(rows)]
    config = ClusterConfig(
        namespace="",
        run_dir="",
        redis_url=_redis_url(data.redis),
        policy=data.policy,
        devices=devices,
        models=models,
        external=external,
        knobs=data.knobs,
        host=data.frontend.host,
        port=data.frontend.port,
        admin=admin_address(data.frontend.admin, base_dir),
        scheduler=data.scheduler,
        engine=engine,
        frontend=_with_tls(data.frontend, base_dir),
        journal=_journal(data.journal),
        keys=read_keys(data.access, variable, base_dir, _names_of_keys(models, external)),
        open_to_all=data.access.open_to_all,
        hang_timeout_s=float(data.hang_timeout),
        source=str(source),
        variable_keys=list(variable),
        node=node,
        nodes=nodes_of(data),
        cluster_key=cluster_key_of(data, base_dir),
    )
    check_names(config)
    _one_of(data.engine.kv_layout, tuple(KV_LAYOUTS), "engine.kv_layout")
    for index, model in enumerate(models):
        _check_spread(model, f"models[{index}]")
    config = with_engine_needs(config)
    check_loadable(config)
    check_parsers(config)
    given = zip(models, rows, strict=True)
    models = [_replicated(m, row, f"models[{i}]", config) for i, (m, row) in enumerate(given)]
    models = [with_layout(model, config, data.engine.kv_layout) for model in models]
    config = _with_degrees(msgspec.structs.replace(config, models=models), rows, read)
    check_memory(config)
    _check_shares(config)
    _check_turns(config)
    return config


def _names_of_keys(models: list[ModelSpec], external: list[ExternalModel]) -> list[str]:
    """Returns the names of models that keys may be limited to."""
    return [n for model in models for n in model.own_names] + [model.name for model in external]


def _check_policy(data: ServeYaml) -> None:
    """Raises ConfigError for an unknown policy, or a device that it does not read."""
    policy = live_policy(data)
    if policy.simulates:
        registry.simulator(policy.name)
    for index, model in enumerate(data.models):
        if policy.search is not None and model.device is not None:
            raise ConfigError(
                f"models[{index}].device: cannot be combined with policy {data.policy!r}, which"
                " searches a placement; remove the key or use another policy"
            )


def _check_turns(config: ClusterConfig) -> None:
    """Raises ConfigError for a cluster on which models cannot take turns, if the policy needs
    that."""
    if live_policy(config).turns is None:
        return
    if len(config.devices) < 2:
        raise ConfigError(
            f"devices: policy {config.policy!r} prefills and decodes on different devices; give at"
            " least two"
        )
    for index, model in enumerate(config.models):
        if model.never_evict or model.replicas_min > 1:
            raise ConfigError(
                f"models[{index}]: never_evict and replicas.min cannot be combined with policy"
                f" {config.policy!r}, whose models leave at each turn; remove the key"
            )


# --- tensor-parallel degrees ---------------------------------------------------------------

_Read = Callable[[ModelYaml, str, int], ModelSpec]


def _default_tp(on_gpus: bool) -> int | Literal["auto"]:
    """Returns 1 for host devices: they share the CPU, so several are not faster than one."""
    return "auto" if on_gpus else 1


def _first(data: ModelYaml) -> int:
    """Returns the number of devices that a model is checked for first."""
    return data.tp if isinstance(data.tp, int) else 1


def _with_degrees(config: ClusterConfig, rows: Sequence[ModelYaml], read: _Read) -> ClusterConfig:
    """Returns `config` with models of `tp: auto` at the least degree at which they fit. One that
    fits at none is unchanged."""
    most = max(Counter(device.node for device in config.devices).values(), default=0)
    for index, data in enumerate(rows):
        if data.tp != "auto":
            continue
        tried = (_at_degree(config, index, data, tp, read) for tp in TP_DEGREES if tp <= most)
        if fitting := [model for model in tried if model is not None]:
            degrees = tuple(model.tp for model in fitting)
            chosen = msgspec.structs.replace(fitting[0], degrees=degrees)
            config = _replaced(config, index, chosen)
    return config


def _at_degree(
    config: ClusterConfig, index: int, data: ModelYaml, tp: int, read: _Read
) -> ModelSpec | None:
    """Returns the model at a degree, None if it cannot have it."""
    model, key = config.models[index], f"models[{index}]"
    images = model.images is not None
    given = msgspec.structs.replace(data, path=model.path, images=images, lora=[])
    try:
        if tp > 1:
            read(given, key, tp)
        _check_spread(msgspec.structs.replace(model, tp=tp), key)
        found = _replicated(spread_over(model, tp), data, key, config)
        check_degree(_replaced(config, index, found), index)
    except ConfigError:
        return None
    return found


def _replaced(config: ClusterConfig, index: int, model: ModelSpec) -> ClusterConfig:
    models = [*config.models[:index], model, *config.models[index + 1 :]]
    return msgspec.structs.replace(config, models=models)


def _with_tls(data: FrontendConfig, base_dir: Path) -> FrontendConfig:
    """Returns `data` with absolute paths. Raises ConfigError if the files cannot be used
    together."""
    files = [
        str(absolute(base_dir, name)) if name else None
        for name in (data.tls_certificate, data.tls_key)
    ]
    certificate, key = files
    if certificate is None and key is None:
        return data
    if certificate is None or key is None:
        raise ConfigError("frontend: tls_certificate and tls_key go together; give both or none")
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key, partial(_refuse_passphrase, key))
    except OSError as error:
        raise ConfigError(
            f"frontend.tls_certificate: {certificate} and {key} cannot be used: {error}; give a"
            " certificate and its key, both in PEM format"
        ) from error
    return msgspec.structs.replace(data, tls_certificate=certificate, tls_key=key)


def _refuse_passphrase(key: str) -> str:
    """Raises ConfigError. Otherwise OpenSSL would ask for a passphrase on the terminal."""
    raise ConfigError(
        f"frontend.tls_key: {key} has a passphrase; give a key without one (openssl pkey -in KEY)"
    )


def measured(config: ClusterConfig, context_bytes: Mapping[str, int]) -> ClusterConfig:
    """Returns `config` with measured instead of planned CUDA contexts, by device. Raises
    ConfigError if something does not fit any more."""
    config = with_engine_needs(config, context_bytes)
    check_memory(config)
    return config


def _check_spread(model: ModelSpec, key: str) -> None:
    if model.embedding and model.lora.adapters:
        raise ConfigError(
            f"{key}.lora: cannot be combined with an embedding model; remove the adapters"
        )
    if model.tp == 1:
        return
    if model.embedding:
        raise ConfigError(f"{key}.tp: an embedding model must be on one device; use tp 1")
    if model.pinned_device is not None:
        raise ConfigError(f"{key}.device: cannot be combined with tp {model.tp}; remove the key")
    if part := undivided(model, model.tp):
        raise ConfigError(
            f"{key}.tp: {part} cannot be shared by {model.tp} devices; choose a divisor"
        )


def _check_divides(
    files: ModelFiles, tp: int, adapter: str, traits: EngineTraits, key: str
) -> None:
    """Raises ConfigError for a model that the adapter's engines cannot divide."""
    kind = files.decoder.model_type
    if not traits.spreads:
        raise ConfigError(f"{key}: {adapter} engines run on one device each; remove the key")
    heads = files.pools.num_kv_heads
    if kind in traits.divided_heads and heads % tp:
        raise ConfigError(
            f"{key}: {heads} KV heads of {kind} cannot be shared by {tp} devices; choose a divisor"
        )


def _replicated(model: ModelSpec, data: ModelYaml, key: str, config: ClusterConfig) -> ModelSpec:
    here = (d for d in config.devices if model.pinned_device in (None, d.name))
    fewest, most = data.replicas.bounds(key, (d.node for d in here), model.tp)
    never_evict = model.never_evict or fewest > 1
    changes = {"replicas_min": fewest, "replicas_max": most, "never_evict": never_evict}
    return msgspec.structs.replace(model, **changes)


def _check_shares(config: ClusterConfig) -> None:
    divided = [device.name for device in config.devices if device.sm_percent]
    if divided and not config.engine.mps:
        raise ConfigError(f"devices: sm_percent of {divided[0]} needs MPS; set engine.mps: true")


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


def _check_frontend(data: FrontendConfig) -> None:
    if not 0 <= data.port <= 65535:
        raise ConfigError(
            f"frontend.port: {data.port} is not a valid port; choose 1 to 65535, or 0 for any"
            " free one"
        )
    _at_least(data.max_open_requests, 1, "frontend.max_open_requests")
    data.priority.check("frontend.priority")
    _check_images(data.images)
    if not 1 <= data.processes <= FRONTENDS_MAX:
        raise ConfigError(
            f"frontend.processes: {data.processes} is out of range; choose 1 to {FRONTENDS_MAX}"
        )
    check_origins(data.cors_origins)
    _check_traces(data.traces)


def _check_images(data: ImagesConfig) -> None:
    key = "frontend.images"
    _at_least(data.count_max, 1, f"{key}.count_max")
    _at_least(data.pixels_max, 1, f"{key}.pixels_max")
    if data.request_bytes > (most := ENGINE_MESSAGE_BYTES_MAX // 2):
        raise ConfigError(
            f"{key}.request_max: {data.request_bytes.text} is too large for a message to an engine;"
            f" give at most {most >> 20}MiB"
        )


def _check_traces(address: str) -> None:
    if address and urlsplit(address).scheme not in ("http", "https"):
        raise ConfigError(
            f"frontend.traces: {address!r} is not an HTTP address; an OpenTelemetry collector's is"
            " http://127.0.0.1:4318/v1/traces, for example"
        )
    if address and not _has_opentelemetry():
        raise ConfigError(
            "frontend.traces needs OpenTelemetry; pip install 'prism-serving[traces]'"
        )


def _has_opentelemetry() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _journal(data: JournalYaml) -> JournalConfig:
    _one_of(data.keep, decision_journal.KEPT, "journal.keep")
    return JournalConfig(data.keep, int(data.max))


def _check_scheduler(data: SchedulerConfig) -> None:
    _at_least(data.migration_threshold, 0, "scheduler.migration_threshold")
    _at_least(data.contended_requests, 0, "scheduler.contended_requests")
    _one_of(data.migrate_running, MIGRATE_RUNNING, "scheduler.migrate_running")


def _engine(data: EngineConfig, base_dir: Path) -> EngineConfig:
    _one_of(data.adapter, adapter_names(), "engine.adapter")
    for name in data.python:
        _one_of(name, adapter_names(), "engine.python")
    _one_of(data.weight_links, ("node", "own"), "engine.weight_links")
    _one_of(data.cuda_graphs, CUDA_GRAPHS, "engine.cuda_graphs")
    if data.attention_backend is not None:
        _one_of(data.attention_backend, ATTENTION_BACKENDS, "engine.attention_backend")
    _at_least(data.max_running, 1, "engine.max_running")
    _at_least(data.lora.slots, 1, "engine.lora.slots")
    _at_least(data.lora.rank_max, 1, "engine.lora.rank_max")
    _at_least(data.prefill_chunk_tokens, 1, "engine.prefill_chunk_tokens")
    return msgspec.structs.replace(
        data,
        weight_store=_weight_store(data.weight_store, base_dir),
        # Not resolved: the interpreter of an environment is a link to another one's.
        python={k: str(base_dir / Path(v).expanduser()) for k, v in data.python.items()},
    )


def _weight_store(wanted: str, base_dir: Path) -> str:
    """Returns the folder of the weight store, or AUTO_STORE. Empty: no store."""
    if wanted in ("off", ""):
        return ""
    return wanted if wanted == AUTO_STORE else str(absolute(base_dir, wanted))


def _model(
    data: ModelYaml,
    key: str,
    tp: int,
    *,
    base_dir: Path,
    engine: EngineConfig,
    of_hub: OfHub,
    on_gpus: bool,
) -> ModelSpec:
    path, hub_name = folder_of(base_dir, data.path, f"{key}.path", of_hub)
    adapter = data.adapter or engine.adapter
    traits = adapter_named(adapter).traits()
    images = takes_images(data, path, key, traits, tp)
    files = _files(data, path, key, traits, images=images)
    dtype = _dtype(data, files, on_gpus=on_gpus)
    if tp > 1:
        _check_divides(files, tp, adapter, traits, f"{key}.tp")
    if data.lora and not traits.lora:
        raise ConfigError(f"{key}.lora: {adapter} engines do not support LoRA; remove the key")
    if method := files.quantization:
        check_quantization(method, path, f"{key}.path", traits, on_gpus=on_gpus)
        check_options(method, key, dtype, tp=tp, adapters=bool(data.lora))
    kv_dtype = kv_cache_dtype(data.kv_cache_dtype, dtype, files, key, traits)
    if on_gpus and kv_dtype != dtype:
        is_latent = files.pools.latent_rope_dim is not None
        check_attention(kv_dtype, engine.attention_backend, key, traits, latent=is_latent)
    return ModelSpec(
        name=data.name,
        path=str(path),
        **files.shape(dtype, data.context_length, kv_dtype),
        slo_ttft_s=float(data.slo.ttft),
        slo_tpot_s=float(data.slo.tpot),
        slo_least_ttft_s=float(data.slo.least_ttft or 0),
        slo_least_tpot_s=float(data.slo.least_tpot or 0),
        never_evict=data.never_evict,
        pinned_device=data.device,
        static_share=data.static_share,
        expected=_expected(data),
        tp=tp,
        tool_parser=data.tool_parser,
        reasoning_parser=data.reasoning_parser,
        adapter=adapter,
        block_tokens=traits.block_tokens_of(latent=files.pools.latent_rope_dim is not None),
        aliases=tuple(data.aliases),
        embedding=embedding_of(path, data.embeddings, f"{key}.embeddings"),
        lora=lora_spec(
            [
                (each.name, *folder_of(base_dir, each.path, f"{key}.lora[{i}].path", of_hub))
                for i, each in enumerate(data.lora)
            ],
            (path, files, dtype),
            f"{key}.lora",
            engine.lora,
            images=images,
        ),
        hub_name=hub_name,
        images=image_spec(path, key, traits, engine, dtype) if images else None,
    )


def _dtype(data: ModelYaml, files: ModelFiles, *, on_gpus: bool) -> str:
    if data.dtype != "auto":
        return data.dtype
    # CPU kernels of half precision are slow and less exact: host devices serve in float32.
    return files.stored_dtype if on_gpus else "float32"


def _files(
    data: ModelYaml, path: Path, key: str, traits: EngineTraits, *, images: bool
) -> ModelFiles:
    """Returns the model's files. Raises ConfigError, also for a context that they do not have."""
    kinds = traits.window_pools, traits.windows, traits.whole_weights
    files = inspect_model(path, f"{key}.path", *kinds, images=images)
    if data.context_length is not None and data.context_length > files.context_length:
        raise ConfigError(
            f"{key}.context_length: {data.context_length} is more than the {files.context_length}"
            f" tokens that {path}/config.json has, by its positions or its sliding window; lower"
            " it, or leave the key out"
        )
    return files


def _expected(data: ModelYaml) -> ExpectedLoad | None:
    load = data.expected
    return ExpectedLoad(load.rate, load.prompt_tokens, load.output_tokens) if load else None


def _check_model_values(data: ModelYaml, key: str, base_dir: Path) -> None:
    check_model_names(data, key)
    if not data.path:
        raise ConfigError(f"{key}.path: is missing; add it")
    if not hub_name_of(base_dir, data.path):
        check_folder(absolute(base_dir, data.path), data.path, f"{key}.path")
    _one_of(data.dtype, ("auto", *DTYPE_BYTES), f"{key}.dtype")
    _one_of(data.kv_cache_dtype, (AUTO, *KV_CACHE_DTYPES), f"{key}.kv_cache_dtype")
    if data.context_length is not None:
        _at_least(data.context_length, 1, f"{key}.context_length")
    if isinstance(data.tp, int):
        _at_least(data.tp, 1, f"{key}.tp")
    if data.adapter is not None:
        _one_of(data.adapter, adapter_names(), f"{key}.adapter")
    if data.expected is not None:
        data.expected.check(f"{key}.expected")
    if data.static_share is not None and not 0 < data.static_share <= 1:
        raise ConfigError(f"{key}.static_share: {data.static_share} is not in (0, 1]; write 0.5")
