"""The generators by name, from what the command line gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from prism.errors import ConfigError
from prism.replay import bursty, steady
from prism.replay import generate as production
from prism.replay.generate import Lengths, LengthSource
from prism.replay.options import parse_models, parse_names
from prism.replay.trace import TraceRequest


@dataclass(frozen=True)
class Wanted:
    """What to generate. None: the generator's own, or the preset's, value."""

    kind: str
    models: str | None
    seconds: float
    preset: str | None = None
    rate_rps: float | None = None
    seed: int = 0
    alpha: float = 0.9
    gap_cv: float | None = None
    prefix_share: float = 0.0
    lengths: LengthSource | None = None

    @property
    def rate(self) -> float:
        return 1.0 if self.rate_rps is None else self.rate_rps

    def required_models(self) -> str:
        if self.models is None:
            raise ConfigError("--models: name at least one model, the most popular first")
        return self.models

    def names(self) -> tuple[str, ...]:
        return tuple(parse_names("--models", self.required_models()))


def generate(wanted: Wanted) -> list[TraceRequest]:
    """A trace with default SLOs. Raises ConfigError."""
    kind = "bursty" if wanted.preset else wanted.kind
    if kind not in KINDS:
        raise ConfigError(f"--kind {kind!r}: known are {', '.join(KINDS)}")
    return KINDS[kind](wanted)


def _production(wanted: Wanted) -> list[TraceRequest]:
    config = production.GeneratorConfig(
        shares=parse_models(wanted.required_models()),
        seconds=wanted.seconds,
        rate_rps=wanted.rate,
        seed=wanted.seed,
        prefix_share=wanted.prefix_share,
        lengths=wanted.lengths or Lengths(),
    )
    if wanted.gap_cv is not None:
        config = replace(config, gap_cv=wanted.gap_cv)
    return production.generate(config)


def _bursty(wanted: Wanted) -> list[TraceRequest]:
    if wanted.preset is None:
        config = bursty.BurstyConfig(wanted.names(), wanted.seconds, wanted.rate, wanted.seed)
    else:
        config = _of_preset(bursty.preset(wanted.preset, wanted.seconds, wanted.seed), wanted)
    return bursty.generate_bursty(replace(config, lengths=wanted.lengths or Lengths()))


def _of_preset(config: bursty.BurstyConfig, wanted: Wanted) -> bursty.BurstyConfig:
    if wanted.rate_rps is not None:
        config = replace(config, rate_rps=wanted.rate_rps)
    if wanted.models is None:
        return config
    names = wanted.names()
    if len(names) != len(config.models):
        raise ConfigError(
            f"--models: preset {wanted.preset} has {len(config.models)}, not {len(names)}"
        )
    return replace(config, models=names)


def _steady(wanted: Wanted) -> list[TraceRequest]:
    config = steady.SteadyConfig(
        models=wanted.names(),
        seconds=wanted.seconds,
        rate_rps=wanted.rate,
        alpha=wanted.alpha,
        gap_cv=1.0 if wanted.gap_cv is None else wanted.gap_cv,
        seed=wanted.seed,
        lengths=wanted.lengths or steady.SHAREGPT,
    )
    return steady.generate_steady(config)


KINDS: dict[str, Callable[[Wanted], list[TraceRequest]]] = {
    "production": _production,
    "bursty": _bursty,
    "steady": _steady,
}
