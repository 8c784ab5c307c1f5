"""Trace of a `prism-sim` YAML, read according to `source` or generated according to `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prism.config.schema.units import parse_time
from prism.errors import ConfigError
from prism_replay import transforms
from prism_replay.cli.options import parse_lengths
from prism_replay.formats.reader import FORMATS, read_window
from prism_replay.formats.rows import ReadOptions
from prism_replay.formats.servegen import lengths_file
from prism_replay.generators.base import GeneratorConfig, generate
from prism_replay.generators.kinds import KINDS, config_of, config_of_preset
from prism_replay.lengths import Lengths, LengthSource
from prism_replay.trace import Trace, TraceRequest
from prism_sim.scenario.config import GenerateYaml, SimModelYaml, SimYaml, SourceYaml

Models = Sequence[SimModelYaml]
RATE_RPS = 4.0
OWN_KEYS = {
    "production": ("active_fraction", "gap_cv"),
    "bursty": ("preset",),
    "steady": ("alpha", "gap_cv"),
}
"""Generated kind -> the keys that only some kinds support."""
LENGTHS = ("input_median", "input_max", "output_median", "output_max")


def load_trace(
    config: SimYaml, models: Models, folder: Path, rows: Trace | None = None
) -> list[TraceRequest]:
    """Returns the trace, or the rows if given, at the rate scale. Raises ConfigError or
    TraceError."""
    if rows is not None:
        trace = list(rows)
    elif config.trace is not None:
        trace = read_source(config.trace, config.source, models, config.seed, folder)
    else:
        assert config.generate is not None
        trace = generated(config.generate, models, config.seed)
    if config.rate_scale == 1.0:
        return trace
    return transforms.scale_rate(trace, config.rate_scale, config.seed)


def read_source(
    file: str, source: SourceYaml, models: Models, seed: int, folder: Path
) -> list[TraceRequest]:
    """Reads a trace file. Raises ConfigError or TraceError: one line with the key or the row.
    folder: Start of relative paths."""
    if source.format not in FORMATS:
        known = ", ".join(FORMATS)
        raise ConfigError(f"source.format: {source.format!r} is not one of {known}")
    if source.limit is not None and source.limit < 1:
        raise ConfigError(f"source.limit: {source.limit} must be >= 1")
    window_s = None if source.window is None else float(source.window)
    options = _options(source, folder, window_s, seed)
    trace = read_window(folder / file, source.format, options, window_s)
    if source.limit is not None:
        trace = transforms.limit(trace, source.limit)
    if source.map is not None:
        names = [model.name for model in models]
        trace = transforms.map_onto(trace, names, source.map, "source.map:")
    return trace


def trace_paths(config: SimYaml, folder: Path) -> list[Path]:
    """Returns the files and folders that `load_trace` reads, including missing ones."""
    if config.trace is None:
        return []
    path = folder / config.trace
    paired = lengths_file(path) if config.source.format == "servegen" else None
    lengths = (config.source.lengths or "").partition("=")[2]
    drawn = folder / lengths if lengths else None
    return [found for found in (path, paired, drawn) if found is not None]


def _options(source: SourceYaml, folder: Path, window_s: float | None, seed: int) -> ReadOptions:
    start_s = parse_time(source.start, "source.start") if source.start != "0s" else 0.0
    lengths: LengthSource = Lengths()
    if source.lengths is not None:
        lengths = parse_lengths(source.lengths, "source.lengths:", folder)
    return ReadOptions(seed, source.rate, lengths, start_s, window_s or 3600.0, source.thin)


def generated(how: GenerateYaml, models: Models, seed: int) -> list[TraceRequest]:
    """Returns a generated trace. Raises ConfigError: one line with the key."""
    if how.kind not in KINDS:
        raise ConfigError(f"generate.kind: {how.kind!r} is not one of {', '.join(KINDS)}")
    every = {key for keys in OWN_KEYS.values() for key in keys}
    for key in sorted(every - set(OWN_KEYS[how.kind])):
        if getattr(how, key) is not None:
            kinds = " or ".join(kind for kind, keys in OWN_KEYS.items() if key in keys)
            raise ConfigError(f"generate.{key}: needs kind {kinds}, and the kind is {how.kind}")
    shared = [model.name for model in models if model.share is not None]
    if shared and how.kind != "production":
        raise ConfigError(f"{shared[0]}.share: needs generate.kind production, not {how.kind}")
    try:
        return generate(_config(how, models, seed))
    except ConfigError as error:
        raise ConfigError(f"generate: {error}") from error


def _config(how: GenerateYaml, models: Models, seed: int) -> GeneratorConfig:
    names = [model.name for model in models]
    settings = {
        "seconds": how.seconds,
        "rate_rps": how.rate,
        "seed": seed,
        "alpha": how.alpha,
        "gap_cv": how.gap_cv,
        "active_fraction": how.active_fraction,
        "shares": {model.name: model.share for model in models if model.share is not None},
    }
    if how.preset is not None:
        config: GeneratorConfig = config_of_preset(how.preset, names, settings)
    else:
        rate_rps = RATE_RPS if how.rate is None else how.rate
        config = config_of(how.kind, names, {**settings, "rate_rps": rate_rps})
    assert isinstance(config.lengths, Lengths)
    given = {key: value for key in LENGTHS if (value := getattr(how, key)) is not None}
    return replace(config, lengths=replace(config.lengths, **given))
