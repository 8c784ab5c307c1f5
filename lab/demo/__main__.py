"""`python -m lab.demo`: prepare models, serve them, replay a trace, report, end everything.

It runs the package's own commands, prints each, and checks afterwards that nothing is left.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from lab.demo.page import write_page
from prism.cli.exit_codes import new_app, run
from prism.cli.models import find_recipes
from prism.config.reader import read_yaml
from prism.models.store import prepare
from prism.scheduler.journal import CLUSTER, journal_path
from prism.serve.background import BackgroundServer, free_port, serving, tool

ROOT = Path(__file__).parents[2]
REPORT, LOGS = "demo-replay.html", "demo-logs"
app = new_app()
console = Console()


@app.command(epilog="Example: python -m lab.demo --slo-scale 1,2 --limit 40 --results out")
def demo(
    *,
    config: Annotated[Path, typer.Option(help="The cluster's YAML.")] = ROOT / "examples/demo.yaml",
    trace: Annotated[Path, typer.Option(help="What to replay.")] = ROOT / "traces/demo.jsonl",
    results: Annotated[Path, typer.Option(help="Folder for results.")] = ROOT / "results",
    slo_scale: Annotated[str, typer.Option(help="Scales to judge SLOs at.")] = "0.5,1,2",
    time_scale: Annotated[float, typer.Option(help="0.5 replays twice as fast.")] = 1.0,
    limit: Annotated[int | None, typer.Option(help="Only the first N requests.")] = None,
    port: Annotated[int | None, typer.Option(help="The endpoint's port; default: a free one.")] = (
        None
    ),
) -> None:
    """Serve the demo's models on two host devices and replay a trace against them."""
    began_s = time.monotonic()
    prepare_models(config)
    step("starting prism-serve")
    options = ["--slo-scale", slo_scale, "--time-scale", str(time_scale)]
    options += ["--limit", str(limit)] if limit else []
    with serving(config, port or free_port(), results / LOGS, show=show) as server:
        step("replaying the trace")
        code = replay(server, trace, results, options)
        step("shutting down")
    console.print(f"nothing is left running; {time.monotonic() - began_s:.0f} s in all")
    if code:
        raise typer.Exit(code)
    tell(results)


def prepare_models(config: Path) -> None:
    """Make the models that the YAML names, each in the folder where the YAML expects it."""
    step("preparing models")
    for model in read_yaml(config).models:
        target = (config.parent / model.path).resolve()
        (recipe,) = find_recipes([target.name])
        prepare(recipe, target.parent, lambda line: console.print(f"  {line}", soft_wrap=True))


def replay(server: BackgroundServer, trace: Path, results: Path, options: list[str]) -> int:
    """The exit code of prism-replay; 1 when any request failed."""
    command = [tool("prism-replay"), "run", str(trace), "--url", server.url, "--strict"]
    command += ["--out", str(results / "demo.json"), "--html", str(results / REPORT)]
    show(command + options)
    with subprocess.Popen(command + options) as process:
        return wait_for(process)


def tell(results: Path) -> None:
    """Prints what the cluster did and writes it, with the rest, into demo.html."""
    step("what the cluster did")
    journal = journal_path(results / LOGS, CLUSTER)
    page = results / "demo.html"
    for taken in write_page(page, results / "demo.json", journal, Path(REPORT)):
        when = "start" if taken.time_s < 0 else f"{taken.time_s:.1f} s"
        console.print(f"  {when:>7}  {taken.what}", highlight=False)
    console.print(f"read why: {page}", soft_wrap=True)


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Ctrl-C reaches `process` as well, which then ends by itself with partial results."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        return process.wait()
    except SystemExit:
        process.terminate()
        raise


def step(text: str) -> None:
    console.print(f"[bold cyan]==[/] [bold]{text}[/]")


def show(command: Sequence[str]) -> None:
    words = [Path(command[0]).name, *command[1:]]
    console.print(f"  $ {shlex.join(words)}", style="dim", markup=False, soft_wrap=True)


def end_in_order(number: int, _frame: FrameType | None) -> None:
    """A signal whose default would leave the server behind, in a session of its own."""
    raise SystemExit(128 + number)


def main() -> None:
    """Exit code 2 for wrong input, 1 for a failed step or request."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_in_order)
    run(lambda: app(prog_name="scripts/demo"), "demo")


if __name__ == "__main__":
    main()
