"""Checks of the names of devices, models, aliases and adapters."""

from __future__ import annotations

import re

from prism.config.schema.cluster_config import ClusterConfig, ModelYaml
from prism.errors import ConfigError

_MODEL = re.compile(r"[A-Za-z0-9][\w.:@+/-]*")
_ADAPTER = re.compile(r"[A-Za-z0-9][\w.-]*")


def check_model_names(data: ModelYaml, key: str) -> None:
    """Raises ConfigError for an invalid name."""
    _check(data.name, f"{key}.name")
    for index, alias in enumerate(data.aliases):
        _check(alias, f"{key}.aliases[{index}]")
    for index, adapter in enumerate(data.lora):
        if not _ADAPTER.fullmatch(adapter.name):
            raise ConfigError(
                f"{key}.lora[{index}].name: {adapter.name!r} is not a valid name; write letters,"
                " digits and . _ -"
            )


def check_names(config: ClusterConfig) -> None:
    """Raises ConfigError for missing, repeated or unknown names."""
    devices = [d.name for d in config.devices]
    models = [m.name for m in config.models]
    _check_requested(config)
    for key, names in (("devices", devices), ("models", config.names)):
        if not names and not (key == "devices" and not models):
            raise ConfigError(f"{key}: the list is empty; add at least one entry")
        for index, name in enumerate(names):
            if name in names[:index]:
                where = config.device_key(index) if key == "devices" else f"{key}[{index}]"
                raise ConfigError(f"{where}.name: {name!r} is used twice; rename one")
    for index, model in enumerate(config.models):
        if model.pinned_device is not None and model.pinned_device not in devices:
            raise ConfigError(
                f"models[{index}].device: unknown device {model.pinned_device!r}; choose one of"
                f" {', '.join(devices)}"
            )


def _check(name: str, key: str) -> None:
    if not _MODEL.fullmatch(name):
        raise ConfigError(
            f"{key}: {name!r} is not a valid name; write letters, digits and . _ - : / @ +"
        )


def _check_requested(config: ClusterConfig) -> None:
    """Raises ConfigError if two models have the same alias or adapter name."""
    known: set[str] = set()
    requested = [m.names for m in config.models] + [m.names for m in config.external]
    for index, names in enumerate(requested):
        for name in names[1:]:
            if name in known or name in config.names:
                raise ConfigError(f"models[{index}]: {name!r} is used twice; rename one")
            known.add(name)
