"""Simulations from Python, for notebooks: `simulate(setup, trace)` gives DataFrames."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from prism.config.reader import convert
from prism.errors import ConfigError, TraceError
from prism.policies import added, registry
from prism.policies.policy import Policy
from prism_replay.results import ReplayResults, Summary
from prism_replay.trace import TraceRequest
from prism_sim.cluster.world import World
from prism_sim.output.results import SimResults, as_replay, results_of, write_json
from prism_sim.output.tables import TABLES, TableSource, frame, write_tables
from prism_sim.output.timeline import write_timeline
from prism_sim.scenario.config import SimYaml
from prism_sim.scenario.scenario import Scenario, read_config, resolve, with_changes

if TYPE_CHECKING:
    import polars as pl

Setup = str | Path | Mapping[str, Any]
Rows = Iterable[TraceRequest | Mapping[str, Any]]
Progress = Callable[[int, int], None]


class Results:
    """What became of one simulation. The DataFrames are polars'; docs/prism-sim-results.md has
    their columns. They are made when they are asked for, and need the package polars."""

    def __init__(self, found: SimResults, world: World, judge: Sequence[float]) -> None:
        self._run = TableSource(found, world.records, world.setup)
        self._judge = tuple(judge)

    @property
    def config(self) -> SimYaml:
        """The YAML as it was read, with the changes in it."""
        return self._run.found.config

    @property
    def summary(self) -> Summary:
        """Attainment and latencies, of all requests and by model."""
        return self._run.found.summary

    @property
    def found(self) -> SimResults:
        """All that results.json has."""
        return self._run.found

    @cached_property
    def requests(self) -> pl.DataFrame:
        """A row for each request."""
        return frame("requests", self._run)

    @cached_property
    def models(self) -> pl.DataFrame:
        """A row for each model and SLO scale; `total` is last."""
        return frame("models", self._run)

    @cached_property
    def devices(self) -> pl.DataFrame:
        """A row for each GPU."""
        return frame("devices", self._run)

    @cached_property
    def decisions(self) -> pl.DataFrame:
        """A row for each action of the cluster scheduler, and for its end."""
        return frame("decisions", self._run)

    @cached_property
    def replay(self) -> ReplayResults:
        """The same run in prism-replay's form, of many requests a sample."""
        return as_replay(self._run.found, self._run.records, self._judge)

    def write(self, folder: str | Path, *, requests: bool = True, timeline: bool = False) -> None:
        """What `prism-sim run --out` writes: results.json, report.html and the tables, as CSV and,
        where polars is installed, as Parquet."""
        from prism_sim.output.report import write_report

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "results.json", self._run.found)
        names = [name for name in TABLES if requests or name != "requests"]
        write_tables(folder, self._run, names)
        write_report(folder / "report.html", self._run.found, self.replay)
        if timeline:
            write_timeline(folder / "timeline.json", self._run.setup, self._run.records)


def simulate(
    setup: Setup,
    trace: str | Path | Rows | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
    judge: Sequence[float] = (1.0,),
    progress: Progress | None = None,
) -> Results:
    """Simulate one cluster. Raises ConfigError, TraceError: one line with the key.

    setup: the YAML's path, or a mapping with its keys (relative paths then start here).
    trace: in place of the setup's; a file that `source` of the setup describes (by default in
      Prism's format), or its rows, with keys as in traces/README.md.
    changes: dotted keys such as "gpus.count" -> value.
    policy: in place of the setup's, without a package of its own.
    judge: SLO scales at which attainment is counted.
    progress: called with (requests ended, requests) now and then.
    """
    path = Path(setup) if isinstance(setup, str | Path) else Path("setup")
    if isinstance(setup, Mapping):
        config = with_changes(copy.deepcopy(dict(setup)), changes or {}, path)
    else:
        config = read_config(path, changes)
    rows = None
    if isinstance(trace, str | Path):
        file = str(Path(trace).absolute())
        config = msgspec.structs.replace(config, trace=file, generate=None)
    elif trace is not None:
        rows = _rows(trace)
        config = msgspec.structs.replace(config, trace="trace", generate=None)
    if policy is not None:
        config = msgspec.structs.replace(config, policy="prism")
    return run_scenario(resolve(config, path, rows), judge, policy=policy, progress=progress)


def run_scenario(
    scenario: Scenario,
    judge: Sequence[float] = (1.0,),
    *,
    policy: Policy | None = None,
    progress: Progress | None = None,
) -> Results:
    """Simulate what `scenario.load` has read."""
    world = World(scenario.setup, scenario.work, policy)
    world.progress = progress
    try:
        world.run()
    except Exception as error:
        # whatever a policy of others raises: its traceback gets its name
        if world.policy.name not in registry.own_names():
            error.add_note(f"the policy was {_whose(world.policy.name)}")
        raise
    config = scenario.config
    if policy is not None:
        config = msgspec.structs.replace(config, policy=policy.name)
    return Results(results_of(config, world, judge), world, judge)


def _whose(policy: str) -> str:
    package = f" of the package {added.package(policy)}" if policy in added.names() else ""
    return f"{policy!r}{package}"


class _Rows(msgspec.Struct):
    trace: list[TraceRequest]


def _rows(given: Rows) -> list[TraceRequest]:
    """Raises TraceError that names row and key."""
    rows = list(given)
    if not all(isinstance(row, TraceRequest) for row in rows):
        rows = _converted(rows)  # type: ignore[assignment]
    found: list[TraceRequest] = rows  # type: ignore[assignment]
    for number, row in enumerate(found):
        if not math.isfinite(row.timestamp):
            raise TraceError(f"trace[{number}].timestamp: {row.timestamp} is not a finite number")
    return found


def _converted(rows: list[TraceRequest | Mapping[str, Any]]) -> list[TraceRequest]:
    plain = [msgspec.to_builtins(row) if isinstance(row, TraceRequest) else row for row in rows]
    try:
        return convert({"trace": plain}, _Rows, finite=False).trace
    except ConfigError as error:
        raise TraceError(str(error)) from error
