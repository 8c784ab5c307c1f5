"""Points of a sweep or a search: each a scenario of its own, simulated in any process.

A point's outcome depends on its YAML and trace alone, so the same points give the same bytes on any
number of cores. Outcomes are kept in files named by what they depend on: a sweep that was cut off
goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prism.errors import ConfigError
from prism.replay.results import Summary
from prism.sim.results import results_of
from prism.sim.scenario import load, read_config
from prism.sim.world import World

SCHEMA = "prism-sim-point/1"


class Point(msgspec.Struct, frozen=True):
    """A YAML with changes: dotted key -> value."""

    config: str
    changes: dict[str, Any]
    judge: tuple[float, ...] = (1.0,)


class Outcome(msgspec.Struct, frozen=True):
    """`problem`: why the point cannot be simulated (such as a model larger than its GPUs); then
    there is no summary."""

    changes: dict[str, Any]
    summary: Summary | None = None
    counts: dict[str, int] = {}
    busy: float = 0.0
    problem: str = ""
    schema: str = SCHEMA

    def attainment(self, metric: str, scale: str) -> float:
        """Part of the requests that met `metric` ("ttft", "tpot", "e2e", "all") at an SLO scale;
        0 for a point that could not be simulated."""
        if self.summary is None:
            return 0.0
        value = getattr(self.summary.total.attainment[scale], metric)
        return 0.0 if value is None else float(value)


def simulate(point: Point) -> Outcome:
    """Raises nothing for a ConfigError: it is the outcome."""
    try:
        scenario = load(Path(point.config), point.changes)
    except ConfigError as error:
        return Outcome(point.changes, problem=str(error))
    world = World(scenario.setup, scenario.work)
    world.run()
    found = results_of(scenario.config, world, point.judge)
    busy = sum(gpu.busy for gpu in found.gpus) / len(found.gpus)
    return Outcome(point.changes, found.summary, found.counts, busy)


class Store:
    """Outcomes in a folder, or nowhere."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, point: Point) -> Outcome | None:
        path = self._path(point)
        if path is None or not path.exists():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=Outcome)
        except msgspec.DecodeError:
            # cut off while it was written, or of an earlier version
            return None

    def put(self, point: Point, outcome: Outcome) -> None:
        path = self._path(point)
        if path is not None:
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_bytes(msgspec.json.encode(outcome))
            partial.rename(path)

    def _path(self, point: Point) -> Path | None:
        return None if self._folder is None else self._folder / f"{_key(point)}.json"


def run_points(
    points: Sequence[Point],
    *,
    jobs: int,
    store: Store,
    progress: Callable[[int, int], None],
) -> list[Outcome]:
    """Outcomes in the order of `points`. jobs: processes; 1 uses none but this."""
    found = [store.get(point) for point in points]
    left = [i for i, outcome in enumerate(found) if outcome is None]
    progress(len(points) - len(left), len(points))
    for index, outcome in _simulated(points, left, jobs):
        found[index] = outcome
        store.put(points[index], outcome)
        progress(sum(o is not None for o in found), len(points))
    return [outcome for outcome in found if outcome is not None]


def _simulated(
    points: Sequence[Point], left: Sequence[int], jobs: int
) -> Iterator[tuple[int, Outcome]]:
    numbered = [(i, points[i]) for i in left]
    if jobs <= 1 or len(left) <= 1:
        yield from map(_numbered, numbered)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(jobs, len(left))) as pool:
        yield from pool.imap_unordered(_numbered, numbered)


def _numbered(item: tuple[int, Point]) -> tuple[int, Outcome]:
    return item[0], simulate(item[1])


def _key(point: Point) -> str:
    """What the outcome depends on: the resolved YAML, the trace's bytes, the scales."""
    digest = hashlib.sha256()
    path = Path(point.config)
    try:
        config = read_config(path, point.changes)
    except ConfigError as error:
        digest.update(str(error).encode())
    else:
        digest.update(msgspec.json.encode(config))
        trace = path.parent / config.trace if config.trace else None
        if trace is not None and trace.is_file():
            digest.update(trace.read_bytes())
    digest.update(msgspec.json.encode((SCHEMA, sorted(point.changes.items()), point.judge)))
    return digest.hexdigest()[:32]


def grid(varied: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations, the first key varying slowest."""
    found: list[dict[str, Any]] = [{}]
    for key, values in varied.items():
        found = [{**changes, key: value} for changes in found for value in values]
    return found
