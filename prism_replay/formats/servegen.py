"""Reader of ServeGen's client rates: draws requests, with a model for each client."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from prism.errors import TraceError
from prism_replay.formats.rows import (
    ReadOptions,
    Row,
    check_request_count,
    converted,
    numbered_rows,
)
from prism_replay.lengths import Floats, LengthSource, QuantileLengths, requests_at
from prism_replay.trace import TraceRequest, numbered_lines

WINDOW_S = 600.0


def read_servegen(path: Path, options: ReadOptions) -> list[TraceRequest]:
    """Draws the requests of ServeGen's clients. Raises TraceError.

    The file has a row per client and window of 600 s: model, client, t_s, rate_rps, iat_cv, dist
    (G: Gamma, W: Weibull), p1 (shape), p2 (scale). Requests are drawn for the windows that start
    in [start_s, start_s + seconds) after the first one. Lengths are drawn from the file `*lengths*`
    in the same folder (model, client, t_s, field, mean and quantiles), or from options.lengths for
    clients that are not in it.
    """
    windows = [converted(partial(_window, row), where) for where, row in numbered_rows(path)]
    if not windows:
        raise TraceError(f"{path}: the trace is empty")
    start_s = min(window.t_s for window in windows) + options.start_s
    chosen = [w for w in windows if start_s <= w.t_s < start_s + options.seconds]
    check_request_count(sum(w.rate_rps for w in chosen) * WINDOW_S * options.thin, path)
    lengths = _client_lengths(path)
    trace: list[TraceRequest] = []
    for number, window in enumerate(sorted(chosen, key=lambda w: (w.t_s, w.client))):
        rng = np.random.default_rng([options.seed, 4, number])
        moments_s = window.t_s - start_s + thinned(window.arrivals_s(rng), options.thin, rng)
        source = lengths.get(window.client)
        drawn = source.at(window.t_s) if source else options.lengths
        trace += requests_at(window.client, moments_s, drawn, rng)
    if not trace:
        raise TraceError(f"{path}: no request in {options.seconds:g} s from {options.start_s:g} s")
    return sorted(trace, key=lambda request: request.timestamp)


@dataclass(frozen=True)
class ClientWindow:
    """Traffic of one client in a window of 600 s."""

    client: str
    t_s: float
    """Start of the window, as in the file."""
    rate_rps: float
    weibull: bool
    """True for Weibull gaps, False for Gamma gaps."""
    shape: float
    scale: float

    def arrivals_s(self, rng: np.random.Generator) -> Floats:
        """Returns sorted times in [0, 600) with gaps of the window's distribution."""
        size = int(2 * self.rate_rps * WINDOW_S) + 20
        times_s = np.zeros(0)
        while not len(times_s) or times_s[-1] < WINDOW_S:
            last_s = times_s[-1] if len(times_s) else 0.0
            times_s = np.concatenate([times_s, last_s + np.cumsum(self._gaps_s(size, rng))])
        return np.asarray(times_s[times_s < WINDOW_S])

    def _gaps_s(self, size: int, rng: np.random.Generator) -> Floats:
        if self.weibull:
            return np.asarray(self.scale * rng.weibull(self.shape, size) + 1e-6)
        return np.asarray(rng.gamma(self.shape, self.scale, size) + 1e-6)


@dataclass(frozen=True)
class ClientLengths:
    """Quantiles of a client's token counts, which change over time."""

    levels: Floats
    inputs: dict[float, Floats]
    """Time from which they hold -> quantiles at `levels`."""
    outputs: dict[float, Floats]

    def at(self, t_s: float) -> LengthSource:
        return QuantileLengths(self.levels, _latest(self.inputs, t_s), _latest(self.outputs, t_s))


def thinned(times_s: Floats, kept: float, rng: np.random.Generator) -> Floats:
    return times_s if kept >= 1 else np.asarray(times_s[rng.random(len(times_s)) < kept])


def _window(row: Row) -> ClientWindow:
    if row["dist"] not in {"G", "W"}:
        raise ValueError(f"dist: {row['dist']!r} must be G or W")
    window = ClientWindow(
        client=f"{row['model']}-{row['client']}",
        t_s=float(row["t_s"]),
        rate_rps=float(row["rate_rps"]),
        weibull=row["dist"] == "W",
        shape=float(row["p1"]),
        scale=float(row["p2"]),
    )
    for key, value in (("t_s", window.t_s + 1), ("p1", window.shape), ("p2", window.scale)):
        if not 0 < value < math.inf:
            raise ValueError(f"{key}: {row[key]} is out of range")
    if not 0 <= window.rate_rps < math.inf:
        raise ValueError(f"rate_rps: {row['rate_rps']} is out of range")
    return window


def lengths_file(path: Path) -> Path | None:
    """Returns the file with the lengths of the clients in `path`; None if there is none."""
    return min(path.parent.glob("*lengths*"), default=None)


def _client_lengths(path: Path) -> dict[str, ClientLengths]:
    file = lengths_file(path)
    if file is None:
        return {}
    levels: Floats = np.zeros(0)
    found: dict[str, dict[str, dict[float, Floats]]] = {}
    for number, (where, line) in enumerate(numbered_lines(file)):
        *head, last = next(csv.reader([line.decode()]))
        if not number:
            levels = _floats(last.partition("(")[2].rstrip(")"))
            continue
        model, client, t_s, name = head[:4]
        values = converted(partial(_floats, last), where)
        if len(values) != len(levels):
            raise TraceError(f"{where}: {len(values)} quantiles; the header has {len(levels)}")
        fields = found.setdefault(f"{model}-{client}", {"input": {}, "output": {}})
        fields[name][float(t_s)] = values
    return {
        client: ClientLengths(levels, fields["input"], fields["output"])
        for client, fields in found.items()
        if fields["input"] and fields["output"]
    }


def _latest(quantiles: Mapping[float, Floats], t_s: float) -> Floats:
    """Returns the last quantiles that begin at or before t_s, or else the first ones."""
    begun = [start_s for start_s in quantiles if start_s <= t_s]
    return quantiles[max(begun) if begun else min(quantiles)]


def _floats(text: str) -> Floats:
    return np.array([float(part) for part in text.split()])
