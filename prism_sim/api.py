"""Python API for notebooks: `simulate(setup, trace)` returns DataFrames."""

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
from prism.policies import registry
from prism.policies.policy import Policy
from prism_replay.outcomes import SeedGroup, difference_rows, seed_rows, sweep_rows
from prism_replay.results import ReplayResults, Summary, write_json
from prism_replay.trace import TraceRequest
from prism_sim.cluster.world import World
from prism_sim.output.results import SimResults, as_replay, results_of
from prism_sim.output.tables import (
    TABLES,
    TableSource,
    frame,
    frame_of_rows,
    to_pandas,
    write_tables,
)
from prism_sim.output.timeline import write_timeline
from prism_sim.scenario.config import SimYaml
from prism_sim.scenario.scenario import Scenario, read_config, resolve, with_changes
from prism_sim.sweeps.points import outcome_of

if TYPE_CHECKING:
    import polars as pl

__all__ = ["Comparison", "Results", "compare", "run_scenario", "simulate", "to_pandas"]

Setup = str | Path | Mapping[str, Any]
Rows = Iterable[TraceRequest | Mapping[str, Any]]
Progress = Callable[[int, int], None]


class Results:
    """Results of one simulation.

    The DataFrames are made on first use and need the package polars. docs/prism-sim-results.md
    describes their columns.
    """

    def __init__(self, found: SimResults, world: World, judge: Sequence[float]) -> None:
        self._run = TableSource(found, world.records, world.setup)
        self._judge = tuple(judge)

    @property
    def config(self) -> SimYaml:
        """The parsed YAML with the changes applied."""
        return self._run.found.config

    @property
    def summary(self) -> Summary:
        """Attainment and latencies of all requests and of each model."""
        return self._run.found.summary

    @property
    def found(self) -> SimResults:
        """The content of results.json."""
        return self._run.found

    @cached_property
    def requests(self) -> pl.DataFrame:
        """One row per request."""
        return frame("requests", self._run)

    @cached_property
    def models(self) -> pl.DataFrame:
        """One row per model and SLO scale; `total` is last."""
        return frame("models", self._run)

    @cached_property
    def devices(self) -> pl.DataFrame:
        """One row per GPU."""
        return frame("devices", self._run)

    @cached_property
    def decisions(self) -> pl.DataFrame:
        """One row for each action of the cluster scheduler, and one for its completion."""
        return frame("decisions", self._run)

    @cached_property
    def replay(self) -> ReplayResults:
        """The run in prism-replay's format, with a sample of the requests if there are many."""
        return as_replay(self._run.found, self._run.records, self._judge)

    def write(self, folder: str | Path, *, requests: bool = True, timeline: bool = False) -> None:
        """Writes the files of `prism-sim run --out`: results.json, report.html and the tables as
        CSV and, if polars is installed, as Parquet."""
        from prism_sim.output.report import write_report

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "results.json", self._run.found)
        names = [name for name in TABLES if requests or name != "requests"]
        write_tables(folder, self._run, names)
        write_report(folder / "report.html", self._run.found, self.replay)
        if timeline:
            write_timeline(folder / "timeline.json", self._run.setup, self._run.records)


class Comparison:
    """Results of several policies over common seeds.

    The DataFrames are made on first use and need the package polars. docs/prism-sim-results.md
    describes their columns.
    """

    def __init__(self, groups: Sequence[SeedGroup], against: str) -> None:
        self._groups = groups
        self._against = against

    @cached_property
    def means(self) -> pl.DataFrame:
        """One row per policy and SLO scale: means over seeds, with the half-widths of their 95 %
        confidence intervals."""
        return frame_of_rows(sweep_rows(self._groups))

    @cached_property
    def seeds(self) -> pl.DataFrame:
        """One row per policy, seed and SLO scale."""
        return frame_of_rows(seed_rows(self._groups))

    @cached_property
    def differences(self) -> pl.DataFrame:
        """One row per SLO scale for each policy but the one that it is compared with."""
        return frame_of_rows(self.difference_rows())

    def difference_rows(self) -> list[dict[str, Any]]:
        """Returns the rows of `differences`, without polars."""
        return difference_rows(self._groups, self._against)

    @property
    def groups(self) -> Sequence[SeedGroup]:
        """Summaries of each policy's runs."""
        return self._groups

    def write(self, folder: str | Path, title: str = "Comparison") -> None:
        """Writes the files of `prism-sim run --policies A,B --seeds N --out` except for those of
        each run: run.json, run.csv, seeds.csv, differences.csv and report.html."""
        from prism_sim.sweeps.pages import write_sweep

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_sweep(folder, self._groups, self.difference_rows(), title, "run")


def compare(
    setup: Setup,
    policies: Sequence[str],
    seeds: Sequence[int],
    trace: str | Path | Rows | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    against: str | None = None,
    judge: Sequence[float] = (1.0,),
    on_run: Callable[[str, int, Results], None] | None = None,
) -> Comparison:
    """Simulates each policy with each seed. Raises ConfigError or TraceError as `simulate`.

    Args:
        setup: As in `simulate`, and so are trace, changes and judge.
        policies: Names of installed policies.
        seeds: Seeds of the trace, the same for all policies.
        against: Policy that the others are compared with. Default: the first.
        on_run: Called with each policy, seed and results, such as to keep the tables of requests.
    """
    if not (policies and seeds):
        raise ConfigError("policies and seeds: must not be empty")
    if against is not None and against not in policies:
        raise ConfigError(f"against: {against!r} is not one of {', '.join(policies)}")
    if trace is not None and not isinstance(trace, str | Path):
        trace = _rows(trace)
    groups = []
    for policy in policies:
        outcomes = []
        for seed in seeds:
            own = {"policy": policy, "seed": seed}
            results = simulate(setup, trace, changes={**(changes or {}), **own}, judge=judge)
            outcomes.append(outcome_of(results.found, own))
            if on_run is not None:
                on_run(policy, seed, results)
        groups.append(SeedGroup({"policy": policy}, outcomes))
    return Comparison(groups, against or policies[0])


def simulate(
    setup: Setup,
    trace: str | Path | Rows | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
    judge: Sequence[float] = (1.0,),
    progress: Progress | None = None,
) -> Results:
    """Simulates one cluster. Raises ConfigError or TraceError: one line with the key.

    Args:
        setup: Path of the YAML, or a mapping with its keys. Relative paths in a mapping start at
            the working directory.
        trace: Replaces the setup's trace. A file in the format that the setup's `source` names
            (default: Prism's), or rows with the keys of traces/README.md.
        changes: Dotted keys such as "gpus.count" -> value.
        policy: Replaces the setup's policy; need not be in an installed package.
        judge: SLO scales at which attainment is measured.
        progress: Called periodically with (requests ended, requests).
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
    """Simulates a scenario from `scenario.load`."""
    world = World(scenario.setup, scenario.work, policy)
    world.progress = progress
    try:
        world.run()
    except Exception as error:
        # An external policy can raise anything: its name is added to the traceback.
        if world.policy.name not in registry.own_names():
            error.add_note(f"the policy was {_policy_and_package(world.policy.name)}")
        raise
    config = scenario.config
    if policy is not None:
        config = msgspec.structs.replace(config, policy=policy.name)
    return Results(results_of(config, world, judge), world, judge)


def _policy_and_package(policy: str) -> str:
    package = registry.package(policy)
    return f"{policy!r} of the package {package}" if package else repr(policy)


class _Rows(msgspec.Struct):
    trace: list[TraceRequest]


def _rows(given: Rows) -> list[TraceRequest]:
    """Returns the rows as requests. Raises TraceError that names row and key."""
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
