"""`prism-sim`: predicts the SLO attainment of models on shared GPUs, and the GPUs they need."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from prism.cli.exit_codes import new_app
from prism.cli.exit_codes import run as run_command
from prism.cli.terminal import new_console
from prism.errors import ConfigError
from prism.policies import registry
from prism_replay.cli import trace_commands
from prism_replay.cli.options import parse_scales
from prism_replay.report.outcome_tables import difference_table, outcome_table, tail_table
from prism_sim.api import Comparison, Results, compare, run_scenario
from prism_sim.cli import costs as calibrate_cli
from prism_sim.cli import options as opts
from prism_sim.cli.console import Bar, group_of, overview, print_run
from prism_sim.cli.sweep import plan, sweep
from prism_sim.output.results import SimResults
from prism_sim.output.tables import has_polars
from prism_sim.scenario.scenario import check, load, read_config

app = new_app(
    "Simulate many models on shared GPUs, under prism-serve's own schedulers or other systems'"
    " (prism-sim policies). Start with: prism-sim run. More: docs/prism-sim.md.",
    "prism-sim",
)


@app.command(
    epilog="Examples: prism-sim run; prism-sim run cluster.yaml --policy static --gpus 4 "
    "--out results/static --timeline; prism-sim run --policies prism,static --seeds 5 "
    "--against static"
)
def run(
    config: opts.Config = opts.EXAMPLE,
    *,
    policy: opts.PolicyOption = None,
    policies: opts.PoliciesOption = None,
    gpus: opts.GpusOption = None,
    rate_scale: opts.RateScale = None,
    slo_scale: opts.SloScale = None,
    seed: opts.Seed = None,
    set_: opts.SetOption = None,
    judge: Annotated[
        str, typer.Option(help="SLO scales at which attainment is measured: 0.5,1,2")
    ] = "1",
    out: opts.Out = None,
    requests: Annotated[bool, typer.Option(help="Write the table of requests.")] = True,
    timeline: Annotated[bool, typer.Option(help="Also write a Chrome trace.")] = False,
    seeds: opts.Seeds = 1,
    against: opts.Against = None,
) -> None:
    """Simulates one cluster and trace under one policy, or under each of several.

    --out gets results.json, report.html, and the tables requests, models, devices and decisions as
    CSV and Parquet. With --policies each policy has its own folder there, and with --seeds each
    seed. run.json, run.csv (means), seeds.csv, differences.csv (between policies, over common
    seeds) and report.html then cover all runs.
    """
    given = opts.named(gpus=gpus, rate_scale=rate_scale, slo_scale=slo_scale, seed=seed)
    given |= opts.parse_sets(set_ or [])
    scales = parse_scales(judge, "--judge")
    if timeline and out is None:
        raise ConfigError("--timeline needs --out FOLDER")
    if policy is not None and policies is not None:
        raise ConfigError("--policy: cannot be combined with --policies; remove one of them")
    opts.make_folder(out)
    opts.warn_of_policies()
    names = opts.policy_names(policies) if policies is not None else []
    against = opts.reference(against, names, seeds)
    several = opts.seeds_of(config, given, seeds)
    if policies is None and not several:
        chosen = {} if policy is None else {"policy": policy}
        _run_one(config, {**chosen, **given}, scales, out, requests=requests, timeline=timeline)
        return
    names = names or [policy or read_config(config, given).policy]
    for name in names:
        check(read_config(config, {**given, "policy": name}), config)
    if several:
        found = partial(compare, config, names, several, changes=given, judge=scales)
        write = partial(Results.write, requests=requests, timeline=timeline)
        _run_seeds(found, len(names) * seeds, against or None, out, write)
        return
    runs = []
    for name in names:
        folder = out / name if out is not None else None
        opts.make_folder(folder)
        changes = {**given, "policy": name}
        runs.append(_run_one(config, changes, scales, folder, requests=requests, timeline=timeline))
    new_console().print(overview(*runs))
    new_console().print(tail_table(list(map(group_of, runs)), ["policy"]))


@app.command(epilog="Example: prism-sim example > cluster.yaml")
def example() -> None:
    """Prints the YAML of the bundled example, as a start for another file."""
    typer.echo(opts.EXAMPLE.read_text(), nl=False)


@app.command(epilog="Example: prism-sim policies")
def policies() -> None:
    """Lists the policies with their requirements on engines, and the packages that add policies."""
    opts.warn_of_policies()
    for name in registry.names():
        problem = opts.problem_of(name)
        if problem is not None:
            typer.echo(f"warning: {problem}", err=True)
            continue
        origin = f" (package {registry.package(name)})" if name not in registry.own_names() else ""
        typer.echo(f"{name}: {', '.join(sorted(registry.get(name).needs))}{origin}")


app.command(
    epilog="Example: prism-sim sweep cluster.yaml --vary policy=prism,static "
    "--vary rate_scale=1,2,4,8 --seeds 5 --against static --requests --out results/rates"
)(sweep)
app.command(
    epilog="Example: prism-sim plan cluster.yaml --policies prism,static,muxserve++ "
    "--target 0.99 --seeds 5 --against static --requests --out results/plan"
)(plan)
app.add_typer(trace_commands.commands("prism-sim trace"), name="trace")
app.add_typer(calibrate_cli.app)


def _run_one(
    config: Path,
    changes: dict[str, Any],
    scales: tuple[float, ...],
    out: Path | None,
    *,
    requests: bool,
    timeline: bool,
) -> SimResults:
    """Simulates, prints the results, and writes them to `out`."""
    console = new_console()
    since_s = time.perf_counter()
    scenario = load(config, changes)
    with Bar(console, "simulating") as bar:
        results = run_scenario(scenario, scales, progress=bar)
    print_run(console, results.found, results.replay, since_s)
    if out is None:
        return results.found
    results.write(out, requests=requests, timeline=timeline)
    if not has_polars():
        console.print("no Parquet: polars is not installed; run pip install 'prism-sim[frames]'")
    console.print(f"results: {out}")
    return results.found


def _run_seeds(
    compared: Callable[..., Comparison],
    runs: int,
    against: str | None,
    out: Path | None,
    write: Callable[[Results, Path], None],
) -> None:
    """Simulates all policies and seeds, prints means and differences, and writes all to `out`."""
    done = 0

    def ran(policy: str, seed: int, results: Results) -> None:
        nonlocal done
        done += 1
        bar(done, runs)
        if out is not None:
            write(results, out / policy / f"seed-{seed}")

    console = new_console()
    with Bar(console, "simulating") as bar:
        found = compared(against=against, on_run=ran)
    console.print(outcome_table(found.groups, ["policy"]))
    console.print(tail_table(found.groups, ["policy"]))
    if rows := found.difference_rows():
        console.print(difference_table(rows, ["policy"]))
    if out is not None:
        found.write(out, f"{', '.join(group.changes['policy'] for group in found.groups)}")
        console.print(f"results: {out}")


def main() -> None:
    run_command(app, "prism-sim")


if __name__ == "__main__":
    main()
