"""`prism-sim`: what SLO attainment do these models get on these GPUs, and how many are needed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from prism.errors import ConfigError
from prism.replay.cli import parse_scales
from prism.sim.scenario import Scenario, load
from prism.sim.world import World

EXAMPLE = Path(__file__).parent / "examples" / "eight-models.yaml"

app = typer.Typer(
    name="prism-sim",
    help="Simulate many models on shared GPUs: the live schedulers and every baseline, in minutes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

Config = Annotated[
    Path, typer.Argument(metavar="[CONFIG]", help="YAML; without one, the bundled example.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the results.")]
PolicyOption = Annotated[str | None, typer.Option(help="In place of the file's policy.")]
GpusOption = Annotated[int | None, typer.Option(help="In place of the file's gpus.count.", min=1)]
RateScale = Annotated[float | None, typer.Option(help="Multiplies the number of requests.")]
SloScale = Annotated[float | None, typer.Option(help="Multiplies every SLO.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same bytes.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any key: --set engine.mixed_chunk=true; may be repeated."),
]


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


def named(**options: Any) -> dict[str, Any]:
    """Options that were given, by the keys of the YAML."""
    keys = {"gpus": "gpus.count"}
    return {keys.get(k, k): value for k, value in options.items() if value is not None}


def parse_sets(texts: list[str]) -> dict[str, Any]:
    """`["engine.max_running=8"]` to {"engine.max_running": 8}. Raises ConfigError."""
    found = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {text!r}: write KEY=VALUE, such as engine.max_running=64")
        found[key] = yaml.safe_load(value)
    return found


def make_folder(path: Path | None) -> None:
    """Before minutes of work: raise ConfigError if nothing can be written there."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written: {error.strerror}") from error


def main() -> None:
    """The console script: wrong input is one line on stderr and exit code 2."""
    try:
        app()
    except ConfigError as error:
        Console(stderr=True).print(f"prism-sim: {error}", markup=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
