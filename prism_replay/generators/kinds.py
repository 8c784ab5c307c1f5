"""The generators by name, and their configs from a user's settings."""

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
    """Returns the config of one of KINDS.

    Args:
        settings: Fields of the config. A value of None is ignored, as is a field of another kind.
    """
    return replace(KINDS[kind](tuple(models)), **_given_fields(KINDS[kind], settings))


def config_of_preset(
    preset: str, models: Sequence[str] | None, settings: Mapping[str, Any]
) -> BurstyConfig:
    """Returns the config of one of PRESETS, with its fields replaced by `settings`.

    Raises ConfigError.

    Args:
        models: Model names, as many as the preset has; None for the preset's names.
        settings: Fields of the config; see `config_of`.
    """
    if preset not in PRESETS:
        raise ConfigError(f"preset {preset!r} is not one of {', '.join(PRESETS)}")
    found = replace(PRESETS[preset], **_given_fields(BurstyConfig, settings))
    if models is None:
        return found
    if len(models) != len(found.models):
        raise ConfigError(
            f"models: preset {preset} needs {len(found.models)} models, not {len(models)}"
        )
    return replace(found, models=tuple(models))


def _given_fields(kind: type[GeneratorConfig], settings: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(kind)}
    return {key: value for key, value in settings.items() if key in known and value is not None}
