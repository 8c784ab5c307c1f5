"""`python -m prism.demo`: prepare models, serve them, replay a trace, report, end everything.

It runs the package's own commands, prints each, and checks afterwards that nothing is left.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from prism.config_yaml import read_yaml
from prism.errors import ConfigError, PrismError
from prism.models.cli import find_recipes
from prism.models.store import prepare
from prism.served import Server, free_port, serving, tool

ROOT = Path(__file__).parent.parent
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()


@app.command(epilog="Example: python -m prism.demo --slo-scale 1,2 --limit 40 --results out")
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
    with serving(config, port or free_port(), results / "demo-logs", show=show) as server:
        step("replaying the trace")
        code = replay(server, trace, results, options)
        step("shutting down")
    console.print(f"nothing is left running; {time.monotonic() - began_s:.0f} s in all")
    console.print(f"report: {results / 'demo.html'}", soft_wrap=True)
    if code:
        raise typer.Exit(code)


def prepare_models(config: Path) -> None:
    """Make the models that the YAML names, each in the folder where the YAML expects it."""
    step("preparing models")
    for model in read_yaml(config).models:
        target = (config.parent / model.path).resolve()
        (recipe,) = find_recipes([target.name])
        prepare(recipe, target.parent, lambda line: console.print(f"  {line}", soft_wrap=True))


def replay(server: Server, trace: Path, results: Path, options: list[str]) -> int:
    """The exit code of prism-replay; 1 when any request failed."""
    command = [tool("prism-replay"), "run", str(trace), "--url", server.url, "--strict"]
    command += ["--out", str(results / "demo.json"), "--html", str(results / "demo.html")]
    show(command + options)
    with subprocess.Popen(command + options) as process:
        return wait_for(process)


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
    try:
        app(prog_name="python -m prism.demo")
    except PrismError as error:
        Console(stderr=True).print(f"demo: {error}", markup=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
