"""`prism-sim sweep` and `prism-sim plan`: many points on all cores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from prism.cli.replay import parse_scales
from prism.cli.sim_console import Bar
from prism.cli.sim_options import (
    EXAMPLE,
    Config,
    Out,
    SetOption,
    make_folder,
    parse_sets,
    policy_names,
    warn_of_policies,
)
from prism.errors import ConfigError
from prism.replay.console import new_table
from prism.replay.report import percent
from prism.sim.planning import CapacityPlan, Search, plans
from prism.sim.points import (
    Point,
    PointOutcome,
    Store,
    grid,
    refuse_mistakes,
    run_points,
    simulate,
)

Jobs = Annotated[int, typer.Option(help="Processes; 0: one per core. The results are the same.")]
Folder = Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")]
SHORT = {"gpus": "gpus.count"}


def sweep(
    config: Config = EXAMPLE,
    *,
    out: Folder,
    vary: Annotated[
        list[str], typer.Option(help="KEY=A,B,C; the last one is the x axis. May be repeated.")
    ],
    set_: SetOption = None,
    judge: Annotated[str, typer.Option(help="Judge at these SLO scales: 0.5,1,2")] = "1",
    jobs: Jobs = 0,
) -> None:
    """Simulate every combination of the varied keys.

    --out gets sweep.json, sweep.csv and report.html. Points that are there already are not
    simulated again: the same command continues a sweep that was stopped.
    """
    warn_of_policies()
    varied = dict(parse_vary(text) for text in vary)
    fixed = parse_sets(set_ or [])
    make_folder(out)
    scales = parse_scales(judge)
    points = [Point(str(config), {**fixed, **changes}, scales) for changes in grid(varied)]
    refuse_mistakes(points)
    outcomes = _run(points, jobs, Store(out / "points", PointOutcome), "sweep")
    shown = [
        PointOutcome({k: o.changes[k] for k in varied}, o.summary, o.counts, o.busy, o.problem)
        for o in outcomes
    ]
    from prism.sim.report import write_sweep

    write_sweep(out, shown, f"{config.stem}: {' x '.join(varied)}")
    console = Console()
    console.print(sweep_table(shown, list(varied)))
    console.print(f"results: {out}")


def plan(
    config: Config = EXAMPLE,
    *,
    policies: Annotated[str, typer.Option(help="Names, or all.")] = "prism,static",
    target: Annotated[
        float, typer.Option(help="The part of the requests that must meet their SLO.", min=0, max=1)
    ] = 0.99,
    metric: Annotated[str, typer.Option(help="ttft, tpot, e2e or all.")] = "ttft",
    max_gpus: Annotated[int, typer.Option(help="The most GPUs to try.")] = 32,
    set_: SetOption = None,
    jobs: Jobs = 0,
    out: Out = None,
) -> None:
    """Find the fewest GPUs at which each policy meets the target.

    Each policy gets the same budget: doubling, then bisection. --out gets plan.json, plan.csv and
    report.html, with every point that was tried. Points that are there already are not simulated
    again.
    """
    warn_of_policies()
    names = policy_names(policies)
    if metric not in ("ttft", "tpot", "e2e", "all"):
        raise ConfigError(f"--metric {metric!r}: choose one of ttft, tpot, e2e, all")
    make_folder(out)
    fixed = parse_sets(set_ or [])
    most = {**fixed, "gpus.count": max_gpus}
    refuse_mistakes([Point(str(config), {**most, "policy": name}) for name in names], large=True)
    points = out / "points" if out else None
    searches = [
        Search(str(config), fixed, name, target, metric, max_gpus, points) for name in names
    ]
    with Bar(Console(stderr=True), "policies") as bar:
        found = plans(searches, jobs=jobs or os.cpu_count() or 1, progress=bar)
    console = Console()
    console.print(plan_table(found))
    if out is not None:
        from prism.sim.report import write_plans

        write_plans(out, found, f"{config.stem}: GPUs for {target:.0%} {metric}")
        console.print(f"results: {out}")


def parse_vary(text: str) -> tuple[str, list[Any]]:
    """`"rate_scale=1,2,4"` to ("rate_scale", [1, 2, 4]). Raises ConfigError."""
    key, _, values = text.partition("=")
    if not key or not values:
        raise ConfigError(f"--vary {text!r}: write KEY=A,B,C, such as rate_scale=1,2,4")
    return SHORT.get(key, key), [yaml.safe_load(value) for value in values.split(",")]


def sweep_table(outcomes: list[PointOutcome], keys: list[str]) -> Table:
    """A row per point, at the SLO scale nearest to 1."""
    table = new_table(None, *keys, "TTFT", "TPOT", "E2E", "all", "busy")
    for outcome in outcomes:
        heads = [str(outcome.changes[key]) for key in keys]
        if outcome.summary is None:
            table.add_row(*heads, outcome.problem.rpartition(": ")[2], "", "", "", "")
            continue
        parts = outcome.summary.total.attainment
        found = parts[min(parts, key=lambda scale: abs(float(scale) - 1))]
        values = (found.ttft, found.tpot, found.e2e, found.all, outcome.busy)
        table.add_row(*heads, *(percent(value) for value in values))
    return table


def plan_table(made: list[CapacityPlan]) -> Table:
    title = f"GPUs for {made[0].target:.0%} {made[0].metric} attainment"
    table = new_table(title, "policy", "GPUs", "attainment", "points tried")
    for found in made:
        gpus = str(found.gpus) if found.gpus is not None else f"{max(found.tried)}+"
        table.add_row(found.policy, gpus, percent(found.attainment), str(len(found.tried)))
    return table


def _run(
    points: list[Point], jobs: int, store: Store[PointOutcome], what: str
) -> list[PointOutcome]:
    with Bar(Console(stderr=True), what) as bar:
        cores = jobs or os.cpu_count() or 1
        return run_points(points, simulate, jobs=cores, store=store, progress=bar)
