"""`python -m lab.demo`: prepares models, serves them, replays a trace and writes a page.

The demo runs and prints the project's own commands, and checks in the end that no process is left.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from lab.demo.page import write_page
from prism.cli.exit_codes import new_app, run
from prism.cli.models import find_recipes
from prism.cli.terminal import new_console
from prism.config.reader import read_yaml
from prism.models.store import prepare
from prism.scheduler.decision_journal import CLUSTER, journal_path
from prism.serve.background import BackgroundServer, free_port, serving, tool
from prism_replay.live import variants
from prism_replay.live.comparison import with_policy
from prism_replay.trace import read_trace

ROOT = Path(__file__).parents[2]
REPORT, LOGS, FIXED = "demo-replay.html", "demo-logs", "demo-fixed.json"
REFUSED_S = 10
app = new_app()
console = new_console()


@app.command(epilog="Example: python -m lab.demo --slo-scale 1,2 --limit 40 --results out")
def demo(
    *,
    config: Annotated[Path, typer.Option(help="The cluster's YAML.")] = ROOT / "examples/demo.yaml",
    trace: Annotated[Path, typer.Option(help="Trace to replay.")] = ROOT / "traces/demo.jsonl",
    results: Annotated[Path, typer.Option(help="Folder for results.")] = ROOT / "results",
    slo_scale: Annotated[str, typer.Option(help="SLO scales to report.")] = "0.5,1,2",
    time_scale: Annotated[float, typer.Option(help="0.5 replays twice as fast.")] = 1.0,
    limit: Annotated[int | None, typer.Option(help="Replay only the first N requests.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the endpoint; default: a free one.")] = (
        None
    ),
    compared: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Replay it with fixed shares as well.")
    ] = True,
) -> None:
    """Serves the demo's models on two host devices and replays a trace against them, then once more
    with fixed shares of the same memory."""
    began_s = time.monotonic()
    prepare_models(config)
    step("starting prism-serve")
    options = ["--slo-scale", slo_scale, "--time-scale", str(time_scale)]
    options += ["--limit", str(limit)] if limit else []
    with serving(config, port or free_port(), results / LOGS, show=show) as server:
        step("replaying the trace")
        command = ["--strict", "--html", str(results / REPORT), *options]
        code = replay(server, trace, results / "demo.json", command)
        step("shutting down")
    if not code and compared:
        step("the same requests with fixed shares of the same memory")
        with served_with_fixed_shares(config, trace, results) as server:
            code = replay(server, trace, results / FIXED, options)
    console.print(f"all processes have ended; {time.monotonic() - began_s:.0f} s in total")
    if code:
        raise typer.Exit(code)
    print_actions(results, results / FIXED if compared else None)


def prepare_models(config: Path) -> None:
    """Creates the YAML's models, each in its configured folder."""
    step("preparing models")
    for model in read_yaml(config).models:
        target = (config.parent / model.path).resolve()
        (recipe,) = find_recipes([target.name])
        prepare(recipe, target.parent, lambda line: console.print(f"  {line}", soft_wrap=True))


def served_with_fixed_shares(
    config: Path, trace: Path, results: Path
) -> AbstractContextManager[BackgroundServer]:
    """Serves the YAML's models with the policy `static`. Requests for a model without a place are
    rejected after REFUSED_S, and not only after the minute of the default."""
    requests = read_trace(trace)
    data = with_policy(variants.read(config, requests), "static", requests)
    frontend = {**data["frontend"], "refused_timeout": f"{REFUSED_S}s"}
    return variants.served(
        config, {**data, "frontend": frontend}, results / "demo-fixed-logs", "demo-fixed"
    )


def replay(server: BackgroundServer, trace: Path, out: Path, options: list[str]) -> int:
    """Runs prism-replay and returns its exit code, 1 if a request failed with --strict."""
    command = [tool("prism-replay"), "run", str(trace), "--url", server.url, "--out", str(out)]
    show(command + options)
    with subprocess.Popen(command + options) as process:
        return wait_for(process)


def print_actions(results: Path, fixed: Path | None) -> None:
    """Prints the cluster's actions and writes demo.html."""
    step("actions of the cluster")
    journal = journal_path(results / LOGS, CLUSTER)
    page = results / "demo.html"
    for action in write_page(page, results / "demo.json", journal, Path(REPORT), fixed):
        when = "start" if action.time_s < 0 else f"{action.time_s:.1f} s"
        console.print(f"  {when:>7}  {action.what}", highlight=False)
    console.print(f"report with the reasons: {page}", soft_wrap=True)


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Waits for `process`. Ctrl-C also reaches `process`, which then ends with partial results."""
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


def exit_on_signal(number: int, _frame: FrameType | None) -> None:
    """Raises SystemExit, so that the server ends too. It runs in a separate session."""
    raise SystemExit(128 + number)


def main() -> None:
    """Runs the demo. Exits with 2 for invalid input, with 1 for a failed step or request."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, exit_on_signal)
    run(lambda: app(prog_name="scripts/demo"), "demo")


if __name__ == "__main__":
    main()
