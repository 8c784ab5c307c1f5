"""`prism-sim`: what SLO attainment do these models get on these GPUs, and how many are needed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from prism.costs import cli as calibrate_cli
from prism.errors import ConfigError, PrismError
from prism.parity.cli import parity
from prism.replay import trace_cli
from prism.replay.cli import parse_scales
from prism.sim.options import (
    EXAMPLE,
    Config,
    GpusOption,
    Out,
    PolicyOption,
    RateScale,
    Seed,
    SetOption,
    SloScale,
    make_folder,
    named,
    parse_sets,
)
from prism.sim.scenario import Scenario, load
from prism.sim.sweep_cli import plan, sweep
from prism.sim.world import World
from prism.studies.cli import study

app = typer.Typer(
    name="prism-sim",
    help="Simulate many models on shared GPUs: the live schedulers and every baseline, in minutes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.command(
    epilog="Example: prism-sim run; prism-sim run cluster.yaml --policy static --gpus 4 "
    "--out results/static --requests --timeline"
)
def run(
    config: Config = EXAMPLE,
    *,
    policy: PolicyOption = None,
    gpus: GpusOption = None,
    rate_scale: RateScale = None,
    slo_scale: SloScale = None,
    seed: Seed = None,
    set_: SetOption = None,
    judge: Annotated[str, typer.Option(help="Judge at these SLO scales as well: 0.5,1,2")] = "1",
    out: Out = None,
    requests: Annotated[bool, typer.Option(help="Also write requests.csv.")] = False,
    timeline: Annotated[bool, typer.Option(help="Also write a Chrome trace.")] = False,
) -> None:
    """Simulate one cluster, policy and trace.

    --out gets results.json, models.csv, decisions.csv and report.html.
    """
    given = named(policy=policy, gpus=gpus, rate_scale=rate_scale, slo_scale=slo_scale, seed=seed)
    scales = parse_scales(judge)
    if (requests or timeline) and out is None:
        raise ConfigError("--requests and --timeline need --out FOLDER")
    make_folder(out)
    since_s = time.perf_counter()
    scenario = load(config, {**given, **parse_sets(set_ or [])})
    _simulate(scenario, scales, out, Extras(requests, timeline), since_s)


@app.command(epilog="Example: prism-sim example > cluster.yaml")
def example() -> None:
    """Print the bundled example's YAML, to start from."""
    typer.echo(EXAMPLE.read_text(), nl=False)


@app.command(epilog="Example: prism-sim policies")
def policies() -> None:
    """List the policies and what each needs of its engines."""
    from prism.policies import registry

    for name in registry.names():
        typer.echo(f"{name}: {', '.join(sorted(registry.get(name).needs))}")


app.command(
    epilog="Example: prism-sim sweep cluster.yaml --vary policy=prism,static "
    "--vary rate_scale=1,2,4,8 --out results/rates"
)(sweep)
app.command(
    epilog="Example: prism-sim plan cluster.yaml --policies prism,static,muxserve++ --target 0.99"
)(plan)
app.command(
    epilog="Example: prism-sim study prism-table1 --out results/studies; prism-sim study --list"
)(study)
app.command(
    epilog="Example: prism-sim parity --config examples/demo.yaml --trace traces/demo.jsonl "
    "--out results/parity"
)(parity)
app.add_typer(trace_cli.app)
app.add_typer(calibrate_cli.app)


class Extras:
    """What else to write."""

    def __init__(self, requests: bool, timeline: bool) -> None:
        self.requests, self.timeline = requests, timeline


def _simulate(
    scenario: Scenario, scales: tuple[float, ...], out: Path | None, extras: Extras, since_s: float
) -> None:
    from prism.sim.console import Bar, print_run
    from prism.sim.results import as_replay, results_of

    console = Console()
    world = World(scenario.setup, scenario.work)
    with Bar(console, "simulating") as bar:
        world.progress = bar
        world.run()
    found = results_of(scenario.config, world, scales)
    replay = as_replay(found, world.records, scales)
    print_run(console, found, replay, since_s)
    if out is not None:
        _write(out, world, found, replay, extras)
        console.print(f"results: {out}")


def _write(out: Path, world: World, found: Any, replay: Any, extras: Extras) -> None:
    from prism.sim import results
    from prism.sim.report import write_report
    from prism.sim.timeline import write_timeline

    results.write_json(out / "results.json", found)
    results.write_models_csv(out / "models.csv", found.summary)
    results.write_decisions_csv(out / "decisions.csv", found.decisions)
    write_report(out / "report.html", found, replay)
    if extras.requests:
        results.write_requests_csv(out / "requests.csv", world.records)
    if extras.timeline:
        write_timeline(out / "timeline.json", world.setup, world.records)


def main() -> None:
    """The console script: one line on stderr; exit code 2 for wrong input, 1 for what failed."""
    try:
        app()
    except ConfigError as error:
        _fail(error, 2)
    except PrismError as error:
        _fail(error, 1)


def _fail(error: PrismError, code: int) -> None:
    Console(stderr=True).print(f"prism-sim: {error}", markup=False, soft_wrap=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
