"""Checks of a configuration's devices and models by its engine adapters."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType

import msgspec

import prism
from prism.config.checks.memory_needs import (
    KV_LAYOUTS,
    arranged,
    check_model_fits,
    check_static,
    grouped,
    one_of_each_kind,
    spread_over,
)
from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.machines import is_gpu
from prism.errors import ConfigError
from prism.messages.model_spec import ModelSpec
from prism.models.files import forget_headers

_PYTHON_S_MAX = 60.0


@cache
def _entry_points() -> Mapping[str, metadata.EntryPoint]:
    """Returns the adapters of all installed packages by name. Prism's own have precedence."""
    found = metadata.entry_points(group="prism.engines")
    own = [point for point in found if point.module.startswith("prism.engines.")]
    return {point.name: point for point in (*found, *own)}


def adapter_names() -> tuple[str, ...]:
    """Returns the names of the installed adapters, sorted. Imports none of them."""
    return tuple(sorted(_entry_points()))


def adapter_module(name: str) -> str:
    """Returns the name of an adapter's package. Raises ConfigError if it is not installed."""
    if name not in _entry_points():
        known = ", ".join(adapter_names()) or "none; run scripts/install or pip install"
        raise ConfigError(f"{name!r} is not an engine adapter; installed adapters: {known}")
    return _entry_points()[name].module


def grammars_module(name: str, module: str) -> str:
    """Returns the name of a module of the package `grammars` of an adapter, an empty string if the
    adapter does not have it. Imports neither the engine nor the module."""
    package = f"{adapter_module(name)}.grammars"
    full = f"{package}.{module}"
    return full if find_spec(package) and find_spec(full) else ""


def adapter_named(name: str) -> ModuleType:
    """Returns an adapter's package. Raises ConfigError if it is not installed."""
    return importlib.import_module(adapter_module(name))


def with_engine_needs(
    config: ClusterConfig, context_bytes: Mapping[str, int] = MappingProxyType({})
) -> ClusterConfig:
    """Returns `config` with the memory that an idle engine process takes on each device, by the
    adapter there that takes most. Raises ConfigError for a device that an adapter cannot serve on,
    and for an engine.static that is too small."""
    devices = []
    for index, device in enumerate(config.devices):
        adapters = config.adapters_on(device.name)
        lacking = (_lacks(name, config, device.name) for name in adapters)
        if problem := next(filter(None, lacking), ""):
            raise ConfigError(f"{config.device_key(index)}.name: {problem}")
        all_needs = (adapter_named(name).needs(device.name) for name in adapters)
        needs = max(all_needs, key=lambda each: each.idle_bytes)
        if known_bytes := context_bytes.get(device.name):
            needs = dataclasses.replace(needs, context_bytes=known_bytes)
        if is_gpu(device.name):
            check_static(config, device.name, needs)
        devices.append(msgspec.structs.replace(device, idle_bytes=needs.idle_bytes))
    return msgspec.structs.replace(config, devices=devices)


def _lacks(name: str, config: ClusterConfig, device: str) -> str:
    """Returns what prevents the adapter's engines from serving on a device, by their Python
    interpreter, or an empty string. Raises ConfigError for an interpreter that cannot run them."""
    python = config.engine.python.get(name)
    if python is None:
        return str(adapter_named(name).lacks(device))
    module = adapter_module(name)
    code = f"import prism, {module} as a; print(prism.__version__, a.lacks({device!r}))"
    key = f"engine.python.{name}: {python}"
    try:
        done = subprocess.run(
            [python, "-c", code],
            cwd="/",  # no folder there has the name of a package
            capture_output=True,
            text=True,
            timeout=_PYTHON_S_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{key} cannot be run ({error}); give a Python interpreter") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"{key} cannot run its engines ({said}); install prism-serving there")
    version, _, problem = done.stdout.strip().partition(" ")
    if version != prism.__version__:
        raise ConfigError(
            f"{key} has prism-serving {version} instead of {prism.__version__}; install the same"
        )
    return problem


def check_loadable(config: ClusterConfig) -> None:
    """Raises ConfigError for a model that its adapter cannot load."""
    for index, model in enumerate(config.models):
        adapter = adapter_named(config.adapter_of(model))
        images = {"images": True} if model.images else {}
        if why := adapter.refuses(Path(model.path), model.embedding is not None, **images):
            raise ConfigError(f"models[{index}].path: {why}")
    forget_headers()


def check_degree(config: ClusterConfig, index: int) -> None:
    """Raises ConfigError if the devices or their engines are too small for a model at its `tp`."""
    check_model_fits(config, index)
    model = config.models[index]
    alone = msgspec.structs.replace(config, models=[model])
    for device in one_of_each_kind(config):
        if is_gpu(device.name):
            needs = adapter_named(config.adapter_of(model)).needs(device.name)
            check_static(alone, device.name, needs)


def check_parsers(config: ClusterConfig) -> None:
    """Raises ConfigError for a parser of answers that its model's adapter does not have."""
    for index, model in enumerate(config.models):
        wanted = {"tool_parser": model.tool_parser, "reasoning_parser": model.reasoning_parser}
        named = {key: name for key, name in wanted.items() if name not in ("auto", "none")}
        known = adapter_named(config.adapter_of(model)).parser_names() if named else {}
        for key, name in named.items():
            if key in known and name not in known[key]:
                raise ConfigError(
                    f"models[{index}].{key}: {name!r} is unknown; give auto, none or one of"
                    f" {', '.join(known[key])}"
                )


def with_layout(model: ModelSpec, config: ClusterConfig, kv_layout: str) -> ModelSpec:
    """Returns the model with its KV layout. Ranks keep their part of the heads per layer, and
    kernels expect latents per layer, whatever `kv_layout` says."""
    is_plain = model.tp > 1 or model.latent_rope_dim is not None or not model.is_plain
    traits = adapter_named(config.adapter_of(model)).traits()
    if traits.block_layers and not model.is_plain:
        model = grouped(model, traits.block_layers)
    asked = KV_LAYOUTS["per_layer" if is_plain else kv_layout]
    model = arranged(model, config, traits.arrangements or asked)
    return spread_over(model, model.tp)
