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
    """prism-serve did not start, or did not end in order; the message says where its log is."""


@dataclass
class BackgroundServer:
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


@contextmanager
def serving(
    config: Path,
    port: int,
    log_dir: Path,
    name: str = "demo",
    show: Callable[[Sequence[str]], None] | None = None,
) -> Iterator[BackgroundServer]:
    """Run prism-serve in a process of its own until the block ends. Raises ServeFailedError.

    name: a part of the run directory's name. show: called with the command.
    """
    run_dir = Path(tempfile.gettempdir()) / f"prism-{name}-{os.getpid()}"
    command = [tool("prism-serve"), "--config", str(config), "--port", str(port)]
    command += ["--run-dir", str(run_dir), "--log-dir", str(log_dir)]
    if show is not None:
        show(command)
    # In a session of its own: Ctrl-C reaches this process alone, which then ends the server.
    process = subprocess.Popen(command, start_new_session=True)
    server = BackgroundServer(process, f"http://127.0.0.1:{port}", run_dir, log_dir)
    try:
        wait_ready(server)
        yield server
    finally:
        stop(server)


def wait_ready(server: BackgroundServer) -> None:
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
    """SIGTERM, wait, and check. Raises ServeFailedError naming what is left."""
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
        raise ServeFailedError(f"left behind by prism-serve: {', '.join(left)}")


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
