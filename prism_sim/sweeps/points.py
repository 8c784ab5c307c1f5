"""Points of a sweep or a search: separate scenarios, which can be simulated in any process.

The outcome of a point depends only on its YAML, its trace and this code, so the same points give
the same bytes on any number of cores. Outcomes are stored in files whose names are digests of these
inputs: an interrupted sweep resumes where it stopped. `lab.papers` adds other kinds of points and
outcomes.
"""

from __future__ import annotations

import hashlib
import inspect
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

import prism
import prism_replay
from prism.config.schema.units import encoded
from prism.errors import ConfigError, TooLargeError
from prism.models.files import config_file
from prism.policies import registry
from prism_replay.outcomes import SCHEMA, PointOutcome
from prism_sim.cluster.world import World
from prism_sim.output.results import SimResults, results_of
from prism_sim.output.tables import TableSource, write_tables
from prism_sim.scenario.config import SimYaml
from prism_sim.scenario.models import shape_source
from prism_sim.scenario.scenario import check, load, read_config, read_data, resolve
from prism_sim.scenario.traces import trace_paths

SIMULATED = ("config", "models", "policies", "scheduler")
"""Packages of prism that a simulation runs."""


class Point(msgspec.Struct, frozen=True):
    """YAML with changes."""

    # Path of the YAML.
    config: str
    # Dotted key -> value.
    changes: dict[str, Any]
    judge: tuple[float, ...] = (1.0,)
    # Folder for the table of its requests; empty: it is not written.
    tables: str = ""


def simulate(point: Point) -> PointOutcome:
    """Simulates a point. A ConfigError becomes the problem of the outcome."""
    try:
        scenario = load(Path(point.config), point.changes)
        world = World(scenario.setup, scenario.work)
    except ConfigError as error:
        return PointOutcome(point.changes, problem=str(error))
    world.run()
    found = results_of(scenario.config, world, point.judge)
    outcome = outcome_of(found, point.changes)
    if not point.tables:
        return outcome
    table = _write_requests(point, TableSource(found, world.records, scenario.setup))
    return msgspec.structs.replace(outcome, requests=table)


def _write_requests(point: Point, run: TableSource) -> str:
    """Writes the table of requests to KEY in the folder of the tables. Returns its path there."""
    folder = Path(point.tables) / _key(point, PointOutcome)
    partial = folder.with_suffix(f".{os.getpid()}")
    partial.mkdir(parents=True, exist_ok=True)
    write_tables(partial, run, ["requests"])
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return f"{folder.name}/requests.csv"


def outcome_of(found: SimResults, changes: dict[str, Any]) -> PointOutcome:
    busy = sum(gpu.busy for gpu in found.gpus) / len(found.gpus)
    return PointOutcome(changes, found.summary, found.counts, busy)


def refuse_mistakes(points: Sequence[Point], *, large: bool = False) -> None:
    """Checks all points before the simulation. Raises ConfigError or TraceError for the first point
    with an error.

    Too few or too small GPUs for a model or a policy are an error only if `large`; otherwise they
    are the outcome of the point. Points that differ only by policy, scales and base SLOs are read
    once.
    """
    for file in dict.fromkeys(point.config for point in points):
        read_data(Path(file))  # a file that cannot be read is not a mistake of a point
    seen: set[bytes] = set()
    for point in points:
        path = Path(point.config)
        try:
            config = read_config(path, point.changes)
            check(config, path)
            plain = msgspec.structs.replace(
                config, policy="prism", rate_scale=1.0, slo_scale=1.0, base_slos=False
            )
            key = msgspec.json.encode((point.config, plain), enc_hook=encoded)
            if key not in seen:
                seen.add(key)
                resolve(plain, path)
        except TooLargeError as error:
            if large:
                raise _at(error, point) from error
        except ConfigError as error:
            raise _at(error, point) from error


def _at(error: ConfigError, point: Point) -> ConfigError:
    given = ", ".join(f"{key}={value}" for key, value in point.changes.items())
    return type(error)(f"{error} (at {given})" if given else str(error))


P = TypeVar("P", bound=Point)
Found = TypeVar("Found", bound=PointOutcome)
Task = TypeVar("Task")
Done = TypeVar("Done")


class Store(Generic[Found]):
    """Outcomes of one kind in a folder, or nowhere."""

    def __init__(self, folder: Path | None, kind: type[Found]) -> None:
        self._folder = folder
        self._kind = kind
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, point: Point) -> Found | None:
        path = self._path(point)
        if path is None or not path.exists():
            return None
        try:
            found = msgspec.json.decode(path.read_bytes(), type=self._kind)
        except msgspec.DecodeError:
            # Incomplete, or written by an earlier version.
            return None
        has_table = found.requests and (Path(point.tables) / found.requests).exists()
        return None if point.tables and found.summary and not has_table else found

    def put(self, point: Point, outcome: Found) -> None:
        path = self._path(point)
        if path is not None:
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_bytes(msgspec.json.encode(outcome))
            partial.rename(path)

    def _path(self, point: Point) -> Path | None:
        return None if self._folder is None else self._folder / f"{_key(point, self._kind)}.json"


def run_points(
    points: Sequence[P],
    simulate: Callable[[P], Found],
    *,
    jobs: int,
    store: Store[Found],
    progress: Callable[[int, int], None],
) -> list[Found]:
    """Returns the outcomes in the order of `points`.

    Args:
        simulate: Function of a module, which other processes import by its name.
        jobs: Number of processes. 1 uses the present process.
    """
    found = [store.get(point) for point in points]
    left = [i for i, outcome in enumerate(found) if outcome is None]
    progress(len(points) - len(left), len(points))
    for index, outcome in in_processes([(i, points[i]) for i in left], simulate, jobs):
        found[index] = outcome
        store.put(points[index], outcome)
        progress(sum(o is not None for o in found), len(points))
    return [outcome for outcome in found if outcome is not None]


def in_processes(
    numbered: Sequence[tuple[int, Task]], do: Callable[[Task], Done], jobs: int
) -> Iterator[tuple[int, Done]]:
    """Yields the results of the tasks in the order of completion. Uses `jobs` processes, or only
    the present one if `jobs` is 1."""
    one = partial(_numbered, do)
    if jobs <= 1 or len(numbered) <= 1:
        yield from map(one, numbered)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(jobs, len(numbered))) as pool:
        yield from pool.imap_unordered(one, numbered)


def _numbered(do: Callable[[Task], Done], item: tuple[int, Task]) -> tuple[int, Done]:
    return item[0], do(item[1])


def _key(point: Point, kind: type[PointOutcome]) -> str:
    """Returns a digest of the inputs of an outcome: resolved YAML, files, point and code."""
    digest = hashlib.sha256(code_digest(kind))
    path = Path(point.config)
    try:
        config = read_config(path, point.changes)
        files = (*_files_of(config, path.parent), *registry.sources(config.policy))
    except ConfigError as error:
        digest.update(str(error).encode())
    else:
        digest.update(msgspec.json.encode(config, enc_hook=encoded))
        for file in files:
            # The name can be that of a model. Name and size also delimit the bytes of each file.
            digest.update(msgspec.json.encode((file.name, file.stat().st_size)))
            digest.update(file.read_bytes())
    changes = dict(sorted(point.changes.items()))
    elsewhere = msgspec.structs.replace(point, config="", changes=changes, tables="")
    digest.update(msgspec.json.encode((SCHEMA, elsewhere)))
    return digest.hexdigest()[:32]


def _files_of(config: SimYaml, folder: Path) -> list[Path]:
    """Returns the files that are read for the YAML, including all files of a trace's folder."""
    named = [folder / name for name in (*config.cost_files, *config.gpu_files)]
    named += trace_paths(config, folder)
    named += [config_file(Path(shape_source(model, folder))) for model in config.models]
    found = [sorted(path.glob("*")) if path.is_dir() else [path] for path in named]
    return [path for paths in found for path in paths if path.is_file()]


@cache
def code_digest(kind: type[PointOutcome]) -> bytes:
    """Returns a digest of the Python files that simulate and that make outcomes of this kind.
    Another version therefore simulates again."""
    digest = hashlib.sha256()
    simulator = Path(__file__).parents[1]
    replay, live = (Path(each.__path__[0]) for each in (prism_replay, prism))
    folders = [simulator, replay, *(live / name for name in SIMULATED)]
    files = {path for folder in folders for path in folder.rglob("*.py")}
    for path in sorted({*live.glob("*.py"), *files, Path(inspect.getfile(kind))}):
        digest.update(path.read_bytes())
    return digest.digest()


def grid(varied: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns all combinations; the first key varies slowest."""
    found: list[dict[str, Any]] = [{}]
    for key, values in varied.items():
        found = [{**changes, key: value} for changes in found for value in values]
    return found


def seeded(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Returns a change for each seed, or one empty change without seeds."""
    return [{"seed": seed} for seed in seeds] or [{}]
