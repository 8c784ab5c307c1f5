"""`prism-sim`: what SLO attainment do these models get on these GPUs, and how many are needed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from prism.cli import costs as calibrate_cli
from prism.cli import sim_options as opts
from prism.cli import trace as trace_cli
from prism.cli.ends import MOVED, moved, new_app
from prism.cli.ends import run as run_command
from prism.cli.replay import parse_scales
from prism.cli.sweep import plan, sweep
from prism.errors import ConfigError
from prism.policies import added, registry
from prism.replay.results import Results
from prism.sim.results import SimResults, as_replay, results_of, write_requests_csv
from prism.sim.scenario import Scenario, check, load, read_config
from prism.sim.timeline import write_timeline
from prism.sim.world import World

app = new_app(
    "Simulate many models on shared GPUs: the live schedulers and every baseline, in minutes.",
    "prism-sim",
)


@app.command(
    epilog="Example: prism-sim run; prism-sim run cluster.yaml --policy static --gpus 4 "
    "--out results/static --requests --timeline"
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
    judge: Annotated[str, typer.Option(help="Judge at these SLO scales as well: 0.5,1,2")] = "1",
    out: opts.Out = None,
    requests: Annotated[bool, typer.Option(help="Also write requests.csv.")] = False,
    timeline: Annotated[bool, typer.Option(help="Also write a Chrome trace.")] = False,
) -> None:
    """Simulate one cluster and trace under one policy, or under each of several.

    --out gets results.json, models.csv, decisions.csv and report.html, with --policies in a folder
    for each of them.
    """
    given = opts.named(gpus=gpus, rate_scale=rate_scale, slo_scale=slo_scale, seed=seed)
    given |= opts.parse_sets(set_ or [])
    scales = parse_scales(judge)
    if (requests or timeline) and out is None:
        raise ConfigError("--requests and --timeline need --out FOLDER")
    if policy is not None and policies is not None:
        raise ConfigError("--policy and --policies: give one of the two")
    opts.make_folder(out)
    opts.warn_of_policies()
    if policies is None:
        chosen = {} if policy is None else {"policy": policy}
        _run_one(config, {**chosen, **given}, scales, out, requests=requests, timeline=timeline)
        return
    names = opts.policy_names(policies)
    for name in names:
        check(read_config(config, {**given, "policy": name}), config)
    for name in names:
        folder = out / name if out is not None else None
        opts.make_folder(folder)
        changes = {**given, "policy": name}
        _run_one(config, changes, scales, folder, requests=requests, timeline=timeline)


@app.command(epilog="Example: prism-sim example > cluster.yaml")
def example() -> None:
    """Print the bundled example's YAML, to start from."""
    typer.echo(opts.EXAMPLE.read_text(), nl=False)


@app.command(epilog="Example: prism-sim policies")
def policies() -> None:
    """List the policies and what each needs of its engines; those of packages with their names."""
    opts.warn_of_policies()
    for name in registry.names():
        problem = opts.problem_of(name)
        if problem is not None:
            typer.echo(f"warning: {problem}", err=True)
            continue
        whose = f" (package {added.package(name)})" if name in added.names() else ""
        typer.echo(f"{name}: {', '.join(sorted(registry.get(name).needs))}{whose}")


app.command(
    epilog="Example: prism-sim sweep cluster.yaml --vary policy=prism,static "
    "--vary rate_scale=1,2,4,8 --out results/rates"
)(sweep)
app.command(
    epilog="Example: prism-sim plan cluster.yaml --policies prism,static,muxserve++ --target 0.99"
)(plan)
app.command("study", **MOVED)(moved("prism-sim study", "papers"))
app.command("parity", **MOVED)(moved("prism-sim parity", "tools.parity"))
app.add_typer(trace_cli.commands("prism-sim trace"), name="trace")
app.add_typer(calibrate_cli.app)


def _run_one(
    config: Path,
    changes: dict[str, Any],
    scales: tuple[float, ...],
    out: Path | None,
    *,
    requests: bool,
    timeline: bool,
) -> None:
    """Simulate, print, and write into `out`."""
    since_s = time.perf_counter()
    world, found, replay = _simulate(load(config, changes), scales, since_s)
    if out is None:
        return
    _write(out, world, found, replay)
    if requests:
        write_requests_csv(out / "requests.csv", world.records)
    if timeline:
        write_timeline(out / "timeline.json", world.setup, world.records)
    Console().print(f"results: {out}")


def _simulate(
    scenario: Scenario, scales: tuple[float, ...], since_s: float
) -> tuple[World, SimResults, Results]:
    """Simulate and print. The last value is the same run in prism-replay's form."""
    from prism.cli.sim_console import Bar, print_run

    console = Console()
    world = World(scenario.setup, scenario.work)
    with Bar(console, "simulating") as bar:
        world.progress = bar
        world.run()
    found = results_of(scenario.config, world, scales)
    replay = as_replay(found, world.records, scales)
    print_run(console, found, replay, since_s)
    return world, found, replay


def _write(out: Path, world: World, found: SimResults, replay: Results) -> None:
    from prism.sim import results
    from prism.sim.report import write_report

    results.write_json(out / "results.json", found)
    results.write_models_csv(out / "models.csv", found.summary)
    results.write_decisions_csv(out / "decisions.csv", found.decisions)
    write_report(out / "report.html", found, replay)


def main() -> None:
    run_command(app, "prism-sim")


if __name__ == "__main__":
    main()
