"""What the adapters of a configuration's models say of its devices and models."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType

import msgspec

import prism
from prism.config.machines import is_gpu
from prism.config.memory import KV_LAYOUTS, arranged, check_static
from prism.config.schema import ClusterConfig
from prism.errors import ConfigError
from prism.messages.models import ModelSpec

_PYTHON_S_MAX = 60.0


def adapter_named(name: str) -> ModuleType:
    return importlib.import_module(f"prism.engines.{name}")


def planned(
    config: ClusterConfig, context_bytes: Mapping[str, int] = MappingProxyType({})
) -> ClusterConfig:
    """With what an engine process takes on each device, of the adapters there the one that takes
    most. Raises ConfigError for devices that an adapter cannot serve on, and for an engine.static
    that cannot work there."""
    devices = []
    for index, device in enumerate(config.devices):
        adapters = config.adapters_on(device.name)
        lacking = (_lacks(name, config, device.name) for name in adapters)
        if missing := next(filter(None, lacking), ""):
            raise ConfigError(f"{config.device_key(index)}.name: {missing}")
        all_needs = (adapter_named(name).needs(device.name) for name in adapters)
        needs = max(all_needs, key=lambda each: each.idle_bytes)
        if known_bytes := context_bytes.get(device.name):
            needs = dataclasses.replace(needs, context_bytes=known_bytes)
        if is_gpu(device.name):
            check_static(config, device.name, needs)
        devices.append(msgspec.structs.replace(device, idle_bytes=needs.idle_bytes))
    return msgspec.structs.replace(config, devices=devices)


def _lacks(name: str, config: ClusterConfig, device: str) -> str:
    """What keeps the adapter's engines from serving on a device, as their interpreter says. Raises
    ConfigError for one that cannot run them."""
    python = config.engine.python.get(name)
    if python is None:
        return str(adapter_named(name).lacks(device))
    code = f"import prism, prism.engines.{name} as a; print(prism.__version__, a.lacks({device!r}))"
    key = f"engine.python.{name}: {python}"
    try:
        done = subprocess.run(
            [python, "-c", code],
            cwd="/",  # not where a folder may have the name of a package
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
    version, _, missing = done.stdout.strip().partition(" ")
    if version != prism.__version__:
        raise ConfigError(
            f"{key} has prism-serving {version}, and this is {prism.__version__}; install the same"
        )
    return missing


def check_loadable(config: ClusterConfig) -> None:
    for index, model in enumerate(config.models):
        adapter = adapter_named(config.adapter_of(model))
        if why := adapter.refuses(Path(model.path), model.embedding is not None):
            raise ConfigError(f"models[{index}].path: {why}")


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
    """Ranks keep their part of the heads per layer, whatever is asked for."""
    of_engines = adapter_named(config.adapter_of(model)).traits().arrangements
    asked = KV_LAYOUTS["per_layer" if model.tp > 1 else kv_layout]
    return arranged(model, config, of_engines or asked)
