"""The generators by name, and their settings as users give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from prism.errors import ConfigError
from prism_replay.generators.base import GeneratorConfig
from prism_replay.generators.bursty import PRESETS, BurstyConfig
from prism_replay.generators.production import ProductionConfig
from prism_replay.generators.steady import SteadyConfig

KINDS: dict[str, type[GeneratorConfig]] = {
    "production": ProductionConfig,
    "bursty": BurstyConfig,
    "steady": SteadyConfig,
}


def config_of(kind: str, models: Sequence[str], settings: Mapping[str, Any]) -> GeneratorConfig:
    """settings: fields of KINDS[kind]. None, and a field that this kind lacks, leaves the
    default."""
    return replace(KINDS[kind](tuple(models)), **_own(KINDS[kind], settings))


def config_of_preset(
    preset: str, models: Sequence[str] | None, settings: Mapping[str, Any]
) -> BurstyConfig:
    """One of PRESETS, with settings in place of its own. models: None for the preset's names.
    Raises ConfigError."""
    if preset not in PRESETS:
        raise ConfigError(f"preset {preset!r}: known are {', '.join(PRESETS)}")
    found = replace(PRESETS[preset], **_own(BurstyConfig, settings))
    if models is None:
        return found
    if len(models) != len(found.models):
        raise ConfigError(
            f"models: preset {preset} needs {len(found.models)} models, not {len(models)}"
        )
    return replace(found, models=tuple(models))


def _own(kind: type[GeneratorConfig], settings: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(kind)}
    return {key: value for key, value in settings.items() if key in known and value is not None}
