"""`python -m prism.demo`: prepare models, serve them, replay a trace, report, end everything.

It runs the package's own commands, prints each, and checks afterwards that nothing is left.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import httpx
import psutil
import typer
from rich.console import Console

from prism.config import read_resolved
from prism.config_yaml import read_yaml
from prism.errors import ConfigError, PrismError
from prism.models.cli import find_recipes
from prism.models.store import prepare

ROOT = Path(__file__).parent.parent
START_S = 300.0
STOP_S = 90.0
GONE_S = 10.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()


class DemoFailedError(PrismError):
    """A step of the demo failed; the message says which and where its log is."""


@dataclass
class Server:
    """A running prism-serve. Everything it starts is below `process`."""

    process: subprocess.Popen[bytes]
    url: str
    run_dir: Path
    log_dir: Path

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


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
    with serving(config, port or free_port(), results / "demo-logs") as server:
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


@contextmanager
def serving(config: Path, port: int, log_dir: Path) -> Iterator[Server]:
    """prism-serve until the block ends, however it ends; then nothing of it is left.

    Raises DemoFailedError.
    """
    run_dir = Path(tempfile.gettempdir()) / f"prism-demo-{os.getpid()}"
    command = [tool("prism-serve"), "--config", str(config), "--port", str(port)]
    command += ["--run-dir", str(run_dir), "--log-dir", str(log_dir)]
    show(command)
    # In a session of its own: Ctrl-C reaches the demo alone, which then ends the server in order.
    process = subprocess.Popen(command, start_new_session=True)
    server = Server(process, f"http://127.0.0.1:{port}", run_dir, log_dir)
    try:
        wait_ready(server)
        yield server
    finally:
        stop(server)


def wait_ready(server: Server) -> None:
    deadline_s = time.monotonic() + START_S
    while not server.is_ready():
        if server.process.poll() is not None:
            raise DemoFailedError(
                f"prism-serve ended with {server.process.returncode}; see {server.log_dir}"
            )
        if time.monotonic() > deadline_s:
            raise DemoFailedError(f"not ready after {START_S:.0f} s; see {server.log_dir}")
        time.sleep(0.2)


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


def stop(server: Server) -> None:
    """SIGTERM, wait, and check. Raises DemoFailedError naming what is left."""
    if server.process.poll() is not None:
        return
    below = psutil.Process(server.process.pid).children(recursive=True)
    segments = device_segments(server.run_dir)
    server.process.send_signal(signal.SIGTERM)
    try:
        server.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.process.kill()
        raise DemoFailedError(f"prism-serve did not end in {STOP_S:.0f} s; killed") from None
    _, alive = psutil.wait_procs(below, timeout=GONE_S)
    left = [f"process {child.pid}" for child in alive]
    left += [str(path) for path in (server.run_dir, *segments) if path.exists()]
    if left:
        raise DemoFailedError(f"left behind by prism-serve: {', '.join(left)}")


def device_segments(run_dir: Path) -> list[Path]:
    """The shared-memory files of the cluster's devices."""
    config = run_dir / "cluster.json"
    if not config.exists():
        return []
    namespace = read_resolved(config).namespace
    return [path for path in Path("/dev/shm").iterdir() if namespace in path.name]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tool(name: str) -> str:
    """The command of this package beside the running interpreter."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise ConfigError(f"{path} is missing; install the package with scripts/install")
    return str(path)


def step(text: str) -> None:
    console.print(f"[bold cyan]==[/] [bold]{text}[/]")


def show(command: list[str]) -> None:
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
