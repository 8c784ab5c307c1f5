"""Changes of a running cluster by another YAML, and checks of what it may not change. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import structs

from prism.config.checks.memory_needs import check_memory
from prism.config.policy_knobs import live_policy
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig
from prism.config.schema.endpoints import node_of
from prism.errors import ConfigError
from prism.messages.model_spec import ModelSpec

# Fields of `frontend` that may change while its processes run.
_FRONTEND = (
    "max_open_requests",
    "shed",
    "priority",
    "progress_timeout_s",
    "queue_timeout_s",
    "refused_timeout_s",
)
# Fields of a model that may change, and their YAML keys.
CHANGEABLE = {
    "slo_ttft_s": "slo.ttft",
    "slo_tpot_s": "slo.tpot",
    "slo_least_ttft_s": "slo.least_ttft",
    "slo_least_tpot_s": "slo.least_tpot",
    "never_evict": "never_evict",
    "pinned_device": "device",
    "expected": "expected",
    "tool_parser": "tool_parser",
    "reasoning_parser": "reasoning_parser",
    "replicas_min": "replicas.min",
    "replicas_max": "replicas.max",
    "aliases": "aliases",
}
# Fields of a model that its engines were started with, and their YAML keys.
FIXED = {
    "path": "path",
    "dtype": "dtype",
    "kv_dtype": "kv_cache_dtype",
    "context_length": "context_length",
    "fixed_tp": "tp",
    "adapter": "adapter",
    "static_share": "static_share",
    "images": "images",
    "lora": "lora",
    "embedding": "embeddings",
    "architecture": "path",
    "num_layers": "path",
    "num_kv_heads": "path",
    "head_dim": "path",
    "latent_rope_dim": "path",
    "derived_bytes": "path",
    "kv_layers": "path",
    "window_layers": "path",
    "window_tokens": "path",
    "window_kv_heads": "path",
    "window_head_dim": "path",
    "window_groups": "path",
    "state_bytes": "path",
    "whole_state_bytes": "path",
    "state_layers": "path",
    "state_groups": "path",
    "divided": "path",
    "weight_bytes": "path",
    "whole_weight_bytes": "path",
    "kv_head_weight_bytes": "path",
}
# Fields that follow from these, from the devices and from the number of models.
DERIVED = ("name", "tp", "degrees", "token_bytes", "kv_arrangement", "block_tokens", "hub_name")
_DEVICE = {
    "name": "name",
    "capacity_bytes": "capacity",
    "capacity_text": "capacity",
    "page_bytes": "page",
}
_JOURNAL = {"max_bytes": "max"}


def reloaded(
    running: ClusterConfig, loaded: ClusterConfig, present: Collection[str]
) -> ClusterConfig:
    """Returns `running` with the changes of `loaded`, which is the result of `load`.

    New models are added. Missing models move to `leaving`. Raises ConfigError that names everything
    that would need a restart.

    Args:
        running: Present configuration.
        loaded: Configuration of the other YAML.
        present: Names of models that a reload removed earlier and that are still in the cluster.
    """
    leaving = {model.name: model for model in running.leaving if model.name in present}
    known = leaving | {model.name: model for model in running.models}
    if refused := [*_fixed(running, loaded), *_fixed_models(running, loaded, known)]:
        raise ConfigError(
            f"{', '.join(dict.fromkeys(refused))}: cannot be changed while the cluster runs; revert"
            " it, or restart prism-serve"
        )
    models = [_with_changes(known.get(model.name), model) for model in loaded.models]
    kept = {model.name for model in models}
    changed = structs.replace(
        running,
        nodes=loaded.nodes,
        devices=_devices(running, loaded),
        models=models,
        leaving=[_as_leaving(model) for name, model in known.items() if name not in kept],
        external=loaded.external,
        scheduler=loaded.scheduler,
        frontend=loaded.frontend,
        keys=loaded.keys,
        source=loaded.source,
    )
    node_changes = _nodes(running, changed)
    more = [each for each in changes(running, changed) if each not in node_changes]
    if running.nodes and more:
        raise ConfigError(
            f"{'; '.join(more)}: a running cluster of several machines may only add and remove"
            " nodes; revert it, or restart prism-serve on all"
        )
    check_memory(changed)
    return changed


def _with_nodes_of(config: ClusterConfig, other: ClusterConfig) -> ClusterConfig:
    """Returns `config` with the nodes of `other`, and with the limits of copies that follow from
    their devices."""
    most = {model.name: model.replicas_max for model in other.models}
    models = [
        structs.replace(each, replicas_max=most.get(each.name, each.replicas_max))
        for each in config.models
    ]
    return structs.replace(config, nodes=other.nodes, devices=other.devices, models=models)


def _devices(running: ClusterConfig, loaded: ClusterConfig) -> list[DeviceConfig]:
    """Returns the loaded devices. Devices that run keep the measured memory of idle engines."""
    known = {device.name: device for device in running.devices}
    return [known.get(device.name, device) for device in loaded.devices]


def changes(before: ClusterConfig, after: ClusterConfig) -> list[str]:
    """Returns the changes for people, each a few words, without the hashes of keys. Empty: nothing
    changed."""
    found = _nodes(before, after)
    if found:
        before = _with_nodes_of(before, after)
    old, new = ({model.name: model for model in each.models} for each in (before, after))
    found += [f"added {name}" for name in new if name not in old]
    found += [f"removed {name}" for name in old if name not in new]
    for name in new.keys() & old.keys():
        for field, key in CHANGEABLE.items():
            found += _change(f"{name}.{key}", getattr(old[name], field), getattr(new[name], field))
    found += _external(before, after)
    for section in ("scheduler", "frontend"):
        found += _section(section, getattr(before, section), getattr(after, section))
    if before.keys != after.keys:
        names = ", ".join(key.name for key in after.keys)
        found.append(f"access.keys are {names}")
    return found


def _external(before: ClusterConfig, after: ClusterConfig) -> list[str]:
    old, new = ({model.name: model for model in each.external} for each in (before, after))
    found = [f"added external {name}" for name in new if name not in old]
    found += [f"removed external {name}" for name in old if name not in new]
    both = [name for name in new if name in old and new[name] != old[name]]
    return found + [f"changed external {name}" for name in both]


def _nodes(before: ClusterConfig, after: ClusterConfig) -> list[str]:
    old, new = ({node.name for node in each.nodes} for each in (before, after))
    came, went = sorted(new - old), sorted(old - new)
    return [*(f"added node {name}" for name in came), *(f"removed node {name}" for name in went)]


def _fixed(running: ClusterConfig, loaded: ClusterConfig) -> Iterator[str]:
    """Yields the YAML keys of changes that need a restart."""
    bundled = running.run_dir in running.redis_url
    if loaded.redis_url != ("" if bundled else running.redis_url):
        yield "redis"
    for key, field in (
        ("policy", "policy"),
        ("knobs", "knobs"),
        ("hang_timeout", "hang_timeout_s"),
    ):
        if getattr(running, field) != getattr(loaded, field):
            yield key
    yield from _fixed_devices(running, loaded)
    yield from (f"engine.{name}" for name in _differing(running.engine, loaded.engine))
    for name in _differing(running.journal, loaded.journal):
        yield f"journal.{_JOURNAL.get(name, name)}"
    allowed = [_yaml_name(running.frontend, field) for field in _FRONTEND]
    for name in _differing(running.frontend, loaded.frontend):
        if name not in allowed:
            yield f"frontend.{name}"
    if running.open_to_all != loaded.open_to_all:
        yield "access.open_to_all"
    if bool(running.keys) != bool(loaded.keys):
        yield "access.keys (adding the first key, or removing the last one)"


def _fixed_devices(running: ClusterConfig, loaded: ClusterConfig) -> Iterator[str]:
    yield from _fixed_nodes(running, loaded)
    both = {n.name for n in running.nodes} & {n.name for n in loaded.nodes} or {""}
    old, new = ([d for d in each.devices if node_of(d.name) in both] for each in (running, loaded))
    if [d.name for d in old] != [d.name for d in new]:
        yield "devices"
        return
    for before, after in zip(old, new, strict=True):
        key = loaded.device_key(loaded.devices.index(after))
        # The memory of idle engines was measured at the start.
        for name in _differing(before, structs.replace(after, idle_bytes=before.idle_bytes)):
            yield f"{key}.{_DEVICE.get(name, name)}"


def _fixed_nodes(running: ClusterConfig, loaded: ClusterConfig) -> Iterator[str]:
    """Yields changes of nodes that need a restart. Whole machines may be added after the others,
    and removed. The first ones have schedulers."""
    old, new = ({node.name: node for node in each.nodes} for each in (running, loaded))
    if bool(old) != bool(new):
        yield "nodes"
    if running.node not in (new or [""]):
        yield f"nodes: {running.node}, which is this machine"
    if list(new)[: len(old.keys() & new.keys())] != [name for name in old if name in new]:
        yield "nodes: the order; append new ones"
    for name in old.keys() & new.keys():
        for field in _differing(old[name], new[name]):
            yield f"nodes: {field} of {name}"


def _fixed_models(
    running: ClusterConfig, loaded: ClusterConfig, known: dict[str, ModelSpec]
) -> Iterator[str]:
    names = {model.name for model in running.models}
    if live_policy(running).never_moves and names != {model.name for model in loaded.models}:
        yield f"models (the policy {running.policy} places each model once)"
    for device in running.devices:
        # Fork servers and their imports are started with the cluster.
        for adapter in set(loaded.adapters_on(device.name)) - set(running.adapters_on(device.name)):
            yield f"models (the first one with the adapter {adapter} on {device.name})"
    for index, new in enumerate(loaded.models):
        old = known.get(new.name)
        for field, key in FIXED.items():
            if old is not None and getattr(old, field) != getattr(new, field):
                leaves = "" if new.name in names else ", which is being removed"
                yield f"models[{index}].{key} of {new.name}{leaves}"


def _with_changes(old: ModelSpec | None, new: ModelSpec) -> ModelSpec:
    """Returns the model with the changes that are allowed. Its KV layout may depend on the number
    of models, and stays as the engines have it."""
    if old is None:
        return new
    return structs.replace(old, **{field: getattr(new, field) for field in CHANGEABLE})


def _as_leaving(model: ModelSpec) -> ModelSpec:
    """Returns a removed model, which stays only for its requests."""
    return structs.replace(model, never_evict=False, replicas_min=1)


def _section(name: str, old: msgspec.Struct, new: msgspec.Struct) -> list[str]:
    found: list[str] = []
    for field in structs.fields(old):
        key = f"{name}.{field.encode_name}"
        before, after = getattr(old, field.name), getattr(new, field.name)
        nested = isinstance(before, msgspec.Struct)
        found += _section(key, before, after) if nested else _change(key, before, after)
    return found


def _change(key: str, old: Any, new: Any) -> Sequence[str]:
    if old == new:
        return ()
    before, after = (getattr(value, "text", value) for value in (old, new))
    return [f"{key} {before} -> {after}"]


def _differing(old: msgspec.Struct, new: msgspec.Struct) -> list[str]:
    """Returns the names, as in the YAML, of fields that differ."""
    return [
        field.encode_name
        for field in structs.fields(old)
        if getattr(old, field.name) != getattr(new, field.name)
    ]


def _yaml_name(struct: msgspec.Struct, field: str) -> str:
    return next(f.encode_name for f in structs.fields(struct) if f.name == field)
