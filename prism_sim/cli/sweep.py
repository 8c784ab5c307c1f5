"""`prism-sim sweep` and `prism-sim plan`, which simulate many points on all cores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from prism.cli.terminal import new_console
from prism.errors import ConfigError
from prism_replay.cli.options import complete_policies, parse_scales
from prism_replay.intervals import Interval
from prism_replay.outcomes import PointOutcome, SeedGroup, difference_rows
from prism_replay.report.console import new_table
from prism_replay.report.outcome_tables import difference_table, outcome_table, shown, tail_table
from prism_sim.cli.console import Bar
from prism_sim.cli.options import (
    EXAMPLE,
    Against,
    Config,
    Out,
    Requests,
    Seeds,
    SetOption,
    make_folder,
    parse_sets,
    parse_value,
    policy_names,
    reference,
    seeds_of,
    warn_of_policies,
)
from prism_sim.scenario.scenario import read_config
from prism_sim.sweeps.planning import (
    CapacityPlan,
    Search,
    answers,
    plan_goal,
    plans,
    tried_groups,
)
from prism_sim.sweeps.points import (
    Point,
    Store,
    grid,
    refuse_mistakes,
    run_points,
    seeded,
    simulate,
)

Jobs = Annotated[
    int, typer.Option(help="Number of processes; 0: one per core. Does not change the results.")
]
Folder = Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")]
SHORT = {"gpus": "gpus.count"}
ONE_SEED = (
    "hint: the plan is for the trace of one seed, others may need more GPUs;"
    " --seeds 5 plans for the mean of five"
)


def sweep(
    config: Config = EXAMPLE,
    *,
    out: Folder,
    vary: Annotated[
        list[str], typer.Option(help="KEY=A,B,C; the last one is the x axis. May be repeated.")
    ],
    set_: SetOption = None,
    judge: Annotated[str, typer.Option(help="Judge at these SLO scales: 0.5,1,2")] = "1",
    seeds: Seeds = 1,
    against: Against = None,
    requests: Requests = False,
    jobs: Jobs = 0,
) -> None:
    """Simulates every combination of the varied keys.

    --out gets sweep.json, sweep.csv (means), seeds.csv (a row per seed), differences.csv (between
    policies, over common seeds) and report.html. Points with an outcome there are not simulated
    again: the same command resumes an interrupted sweep.
    """
    warn_of_policies()
    varied = parse_varies(vary)
    policies = [str(name) for name in varied.get("policy", [])]
    against = reference(against, policies, seeds)
    fixed = parse_sets(set_ or [])
    make_folder(out)
    scales = parse_scales(judge, "--judge")
    if seeds != 1 and "seed" in varied:
        raise ConfigError("--seeds: cannot be combined with --vary seed; remove one of them")
    each = seeded(seeds_of(config, fixed, seeds))
    combinations = grid(varied)
    all_ = [changes | seed for changes in combinations for seed in each]
    tables = str(out / "points") if requests else ""
    points = [Point(str(config), {**fixed, **changes}, scales, tables) for changes in all_]
    refuse_mistakes(points)
    outcomes = _run(points, jobs, Store(out / "points", PointOutcome), "sweep")
    named = [
        msgspec.structs.replace(outcome, changes=changes)
        for changes, outcome in zip(all_, outcomes, strict=True)
    ]
    groups = [
        SeedGroup(changes, named[i * len(each) : (i + 1) * len(each)])
        for i, changes in enumerate(combinations)
    ]
    from prism_sim.sweeps.pages import write_sweep

    differences = difference_rows(groups, against)
    write_sweep(out, groups, differences, f"{config.stem}: {' x '.join(varied)}")
    console = new_console()
    console.print(outcome_table(groups, list(varied)))
    console.print(tail_table(groups, list(varied)))
    if differences:
        console.print(difference_table(differences, list(varied)))
    console.print(f"results: {out}")


def plan(
    config: Config = EXAMPLE,
    *,
    policies: Annotated[
        str, typer.Option(help="Names, or all.", autocompletion=complete_policies)
    ] = "prism,static",
    target: Annotated[
        float, typer.Option(help="The part of the requests that must meet their SLO.", min=0, max=1)
    ] = 0.99,
    metric: Annotated[str, typer.Option(help="ttft, tpot, e2e or all.")] = "ttft",
    max_gpus: Annotated[int, typer.Option(help="Maximum number of GPUs to try.")] = 32,
    set_: SetOption = None,
    seeds: Seeds = 1,
    against: Against = None,
    requests: Requests = False,
    jobs: Jobs = 0,
    out: Out = None,
) -> None:
    """Finds the fewest GPUs at which each policy meets the target, in the mean over seeds.

    The search doubles the number of GPUs, then bisects; its budget is the same for each policy.
    --out gets plan.json, plan.csv, seeds.csv (a row per seed and number of GPUs), differences.csv
    (between policies with as many GPUs, over common seeds) and report.html, with every point that
    was tried. Points with an outcome there are not simulated again.
    """
    if requests and out is None:
        raise ConfigError("--requests needs --out FOLDER")
    warn_of_policies()
    names = policy_names(policies)
    against = reference(against, names, seeds)
    if metric not in ("ttft", "tpot", "e2e", "all"):
        raise ConfigError(f"--metric {metric!r}: choose one of ttft, tpot, e2e, all")
    make_folder(out)
    fixed = parse_sets(set_ or [])
    most = {**fixed, "gpus.count": max_gpus}
    refuse_mistakes([Point(str(config), {**most, "policy": name}) for name in names], large=True)
    points = out / "points" if out else None
    chosen = seeds_of(config, fixed, seeds)
    shown = new_console(stderr=True)
    searches = [
        Search(
            *(str(config), fixed, name, target, metric, max_gpus, points, chosen, requests),
            says=not shown.is_terminal,
        )
        for name in names
    ]
    with Bar(shown, "policies") as bar:
        found = plans(searches, jobs=jobs or os.cpu_count() or 1, progress=bar)
    console = new_console()
    console.print(plan_table(found))
    console.print(tail_table(answers(found), ["policy", "gpus"]))
    differences = difference_rows(tried_groups(found), against)
    if differences:
        console.print(difference_table(differences, ["policy", "gpus"]))
    if not chosen and read_config(config, fixed).trace is None:
        console.print(ONE_SEED)
    if out is not None:
        from prism_sim.sweeps.pages import write_plans

        write_plans(
            out, found, differences, f"{config.stem}: fewest GPUs for {plan_goal(found[0])}"
        )
        console.print(f"results: {out}")


def parse_vary(text: str) -> tuple[str, list[Any]]:
    """Parses a text such as "rate_scale=1,2,4" into ("rate_scale", [1, 2, 4]). Raises
    ConfigError."""
    key, _, values = text.partition("=")
    if not key or not values:
        raise ConfigError(f"--vary {text!r}: not KEY=A,B,C, such as rate_scale=1,2,4")
    return SHORT.get(key, key), [
        parse_value(value, f"--vary {text!r}") for value in values.split(",")
    ]


def parse_varies(texts: list[str]) -> dict[str, list[Any]]:
    """Parses all --vary options into key -> values. Raises ConfigError for a duplicate key."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        key, values = parse_vary(text)
        if key in found:
            raise ConfigError(
                f"--vary {text!r}: {key} is given twice; put all values in one option"
            )
        found[key] = values
    return found


def plan_table(made: list[CapacityPlan]) -> Table:
    title = f"GPUs for {plan_goal(made[0])}"
    table = new_table(title, "policy", "GPUs", "attainment", "points tried")
    for found in made:
        gpus = str(found.gpus) if found.gpus is not None else f"{max(found.tried)}+"
        at = found.gpus if found.gpus is not None else max(found.tried)
        text = shown(
            Interval(found.attainment, found.half_widths.get(at, 0.0)), many=found.seeds > 1
        )
        table.add_row(found.policy, gpus, text, str(len(found.tried)))
    return table


def _run(
    points: list[Point], jobs: int, store: Store[PointOutcome], label: str
) -> list[PointOutcome]:
    with Bar(new_console(stderr=True), label) as bar:
        cores = jobs or os.cpu_count() or 1
        return run_points(points, simulate, jobs=cores, store=store, progress=bar)
