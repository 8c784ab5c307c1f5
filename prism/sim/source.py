"""The trace that a `prism-sim` YAML names, in any of the formats that there are readers for."""

from __future__ import annotations

from pathlib import Path

from prism.errors import ConfigError
from prism.replay import transforms
from prism.replay.formats import FORMATS, read_window
from prism.replay.generate import Lengths, LengthSource
from prism.replay.options import parse_lengths
from prism.replay.rows import ReadOptions
from prism.replay.trace import TraceRequest
from prism.sim.config import SimModelYaml, SourceYaml
from prism.units import parse_time


def read_source(
    path: Path, source: SourceYaml, models: list[SimModelYaml], seed: int
) -> list[TraceRequest]:
    """Raises ConfigError, TraceError: one line with the key or the row."""
    if source.format not in FORMATS:
        known = ", ".join(FORMATS)
        raise ConfigError(f"source.format: {source.format!r} is none of {known}")
    if source.limit is not None and source.limit < 1:
        raise ConfigError(f"source.limit: {source.limit} must be at least 1")
    window_s = parse_time(source.window, "source.window") if source.window else None
    trace = read_window(path, source.format, _options(source, path, window_s, seed), window_s)
    if source.limit is not None:
        trace = transforms.limit(trace, source.limit)
    if source.map is not None:
        names = [model.name for model in models]
        trace = transforms.map_onto(trace, names, source.map, "source.map:")
    return trace


def _options(source: SourceYaml, path: Path, window_s: float | None, seed: int) -> ReadOptions:
    start_s = parse_time(source.start, "source.start") if source.start != "0s" else 0.0
    lengths: LengthSource = Lengths()
    if source.lengths is not None:
        name, equals, file = source.lengths.partition("=")
        lengths = parse_lengths(f"{name}{equals}{path.parent / file if file else file}")
    return ReadOptions(seed, source.rate, lengths, start_s, window_s or 3600.0, source.thin)
