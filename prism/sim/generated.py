"""The trace that `generate:` of a `prism-sim` YAML describes, by the generators that there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from prism.errors import ConfigError
from prism.replay import bursty, steady
from prism.replay.generate import GeneratorConfig, Lengths, generate
from prism.replay.trace import TraceRequest
from prism.sim.config import GenerateYaml, SimModelYaml

Models = Sequence[SimModelYaml]
RATE_RPS = 4.0
OWN_KEYS = {
    "production": ("active_fraction", "gap_cv"),
    "bursty": ("preset",),
    "steady": ("alpha", "gap_cv"),
}
"""Keys that only some kinds take."""
LENGTHS = ("input_median", "input_max", "output_median", "output_max")


def generated(how: GenerateYaml, models: Models, seed: int) -> list[TraceRequest]:
    """Raises ConfigError: one line with the key."""
    if how.kind not in KINDS:
        raise ConfigError(f"generate.kind: {how.kind!r} is none of {', '.join(KINDS)}")
    every = {key for keys in OWN_KEYS.values() for key in keys}
    for key in sorted(every - set(OWN_KEYS[how.kind])):
        if getattr(how, key) is not None:
            kinds = " or ".join(kind for kind, keys in OWN_KEYS.items() if key in keys)
            raise ConfigError(f"generate.{key}: is of kind {kinds}, this is {how.kind}")
    shared = [model.name for model in models if model.share is not None]
    if shared and how.kind != "production":
        raise ConfigError(f"{shared[0]}.share: is of generate.kind production, not {how.kind}")
    try:
        return KINDS[how.kind](how, models, seed)
    except ConfigError as error:
        raise ConfigError(f"generate: {error}") from error


def _production(how: GenerateYaml, models: Models, seed: int) -> list[TraceRequest]:
    config = GeneratorConfig(
        {model.name: model.share for model in models}, how.seconds, _rate_rps(how), seed
    )
    lengths = _lengths(how, Lengths())
    return generate(replace(config, **_given(how, "active_fraction", "gap_cv"), lengths=lengths))


def _bursty(how: GenerateYaml, models: Models, seed: int) -> list[TraceRequest]:
    names = tuple(model.name for model in models)
    config = bursty.BurstyConfig(names, how.seconds, _rate_rps(how), seed)
    if how.preset is not None:
        found = bursty.preset(how.preset, how.seconds, seed)
        if len(names) != len(found.models):
            raise ConfigError(
                f"preset {how.preset} has {len(found.models)} models, this file {len(names)}"
            )
        rate_rps = found.rate_rps if how.rate is None else how.rate
        config = replace(found, models=names, rate_rps=rate_rps)
    return bursty.generate_bursty(replace(config, lengths=_lengths(how, Lengths())))


def _steady(how: GenerateYaml, models: Models, seed: int) -> list[TraceRequest]:
    names = tuple(model.name for model in models)
    config = steady.SteadyConfig(names, how.seconds, _rate_rps(how), seed=seed)
    lengths = _lengths(how, steady.SHAREGPT)
    return steady.generate_steady(
        replace(config, **_given(how, "alpha", "gap_cv"), lengths=lengths)
    )


KINDS: dict[str, Callable[[GenerateYaml, Models, int], list[TraceRequest]]] = {
    "production": _production,
    "bursty": _bursty,
    "steady": _steady,
}


def _rate_rps(how: GenerateYaml) -> float:
    return RATE_RPS if how.rate is None else how.rate


def _lengths(how: GenerateYaml, own: Lengths) -> Lengths:
    return replace(own, **_given(how, *LENGTHS))


def _given(how: GenerateYaml, *keys: str) -> dict[str, Any]:
    return {key: value for key in keys if (value := getattr(how, key)) is not None}
