"""Context manager that runs prism-serve and checks that it cleaned up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from prism.config.resolved import read_resolved
from prism.errors import ConfigError, PrismError

START_S = 300.0
STOP_S = 90.0
GONE_S = 10.0


class ServeFailedError(PrismError):
    """prism-serve did not start, or did not end in order. The message names its log."""


@dataclass
class BackgroundServer:
    """A running prism-serve. Everything that it starts is a descendant of `process`."""

    process: subprocess.Popen[bytes]
    url: str
    run_dir: Path
    log_dir: Path

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def serving(
    config: Path,
    port: int,
    log_dir: Path,
    name: str = "demo",
    show: Callable[[Sequence[str]], None] | None = None,
) -> Iterator[BackgroundServer]:
    """Runs prism-serve in a separate process until the block ends. Raises ServeFailedError.

    SIGTERM ends the block with SystemExit. REQUIRES: the main thread.

    Args:
        config: The YAML.
        port: Port of the API.
        log_dir: Directory of the logs.
        name: Part of the run directory's name.
        show: Called with the command.
    """
    run_dir = Path(tempfile.gettempdir()) / f"prism-{name}-{os.getpid()}"
    command = [tool("prism-serve"), "--config", str(config), "--port", str(port)]
    command += ["--run-dir", str(run_dir), "--log-dir", str(log_dir)]
    if show is not None:
        show(command)
    # In its own session: Ctrl-C only reaches this process, which then ends the server.
    process = subprocess.Popen(command, start_new_session=True)
    server = BackgroundServer(process, f"http://127.0.0.1:{port}", run_dir, log_dir)
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        wait_ready(server)
        yield server
    finally:
        stop(server)
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def wait_ready(server: BackgroundServer) -> None:
    """Waits until the server is ready. Raises ServeFailedError."""
    deadline_s = time.monotonic() + START_S
    while not server.is_ready():
        if server.process.poll() is not None:
            raise ServeFailedError(
                f"prism-serve ended with {server.process.returncode}; see {server.log_dir}"
            )
        if time.monotonic() > deadline_s:
            raise ServeFailedError(f"not ready after {START_S:.0f} s; see {server.log_dir}")
        time.sleep(0.2)


def stop(server: BackgroundServer) -> None:
    """Sends SIGTERM, waits for the end and checks it. Raises ServeFailedError that names what is
    left."""
    if server.process.poll() is not None:
        return
    below = psutil.Process(server.process.pid).children(recursive=True)
    segments = device_segments(server.run_dir)
    server.process.send_signal(signal.SIGTERM)
    try:
        server.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.process.kill()
        raise ServeFailedError(f"prism-serve did not end in {STOP_S:.0f} s; killed") from None
    _, alive = psutil.wait_procs(below, timeout=GONE_S)
    left = [f"process {child.pid}" for child in alive]
    left += [str(path) for path in (server.run_dir, *segments) if path.exists()]
    if left:
        raise ServeFailedError(f"prism-serve did not clean up: {', '.join(left)}")


def device_segments(run_dir: Path) -> list[Path]:
    """Returns the shared-memory files of the cluster's devices."""
    config = run_dir / "cluster.json"
    if not config.exists():
        return []
    namespace = read_resolved(config).namespace
    return [path for path in Path("/dev/shm").iterdir() if namespace in path.name]


def free_port() -> int:
    """Returns a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tool(name: str) -> str:
    """Returns the path of a command of this package, in the interpreter's directory."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise ConfigError(f"{path} is missing; install the package with scripts/install")
    return str(path)
