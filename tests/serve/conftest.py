"""A real `prism-serve` with the fake engine: real processes, sockets, Redis and device memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.frontend.tiny_model import make_model

START_S = 90.0
STOP_S = 60.0


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("slow")


def until(condition: Callable[[], object], what: str, timeout_s: float = 30) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen in {timeout_s} s"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Returns whether the process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def descendants(pid: int) -> list[int]:
    """Returns the pids of all processes below `pid`."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(c) for c in children] + [d for c in children for d in descendants(int(c))]


class Cluster:
    """Running `prism-serve`. `temporary` is the launcher's temporary directory.

    It contains the run directory.
    """

    def __init__(self, process: subprocess.Popen[bytes], temporary: Path, log: Path) -> None:
        self.process, self.temporary, self.log = process, temporary, log
        self.pids: list[int] = []
        self.url = ""

    @property
    def run_dir(self) -> Path:
        return next(p for p in self.temporary.iterdir() if (p / "cluster.json").exists())

    def await_ready(self) -> None:
        until(self._ready, f"ready\n{self.output()}", START_S)
        self.pids = descendants(self.process.pid)
        line = next(x for x in self.output().splitlines() if x.startswith("ready in "))
        self.url = line.split()[-1].removesuffix("/v1")

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.output()
        return "ready in " in self.output()

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def post(self, model: str = "a", **body: Any) -> httpx.Response:
        json = {"model": model, "prompt": [9, 8, 7], "max_tokens": 12, **body}
        return httpx.post(f"{self.url}/v1/completions", json=json, timeout=60)

    def operate(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*SERVE, *arguments, "--run-dir", str(self.run_dir)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    def child(self, name: str) -> int:
        """Returns the pid of the first process whose command line contains `name`."""
        for pid in descendants(self.process.pid):
            if name in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
        raise LookupError(name)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_S)


def serve_command(setup: str = "") -> list[str]:
    return [sys.executable, "-c", f"{setup}\nfrom prism.cli.serve import main\nmain()"]


SERVE = serve_command()


def write_yaml(folder: Path, **changes: Any) -> Path:
    for name in ("a", "b"):
        make_model(folder / name)
    data = {
        "devices": [{"name": "host:0", "capacity": "16MiB", "page": "64KiB", "engines": 2}],
        "models": [{"name": "a", "path": "a"}, {"name": "b", "path": "b"}],
        "engine": {"adapter": "fake", "static": "1MiB", "drain_timeout": "10s"},
        "frontend": {"port": 0},
        **changes,
    }
    path = folder / "prism.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@contextmanager
def serving(
    folder: Path, temporary: Path, fake: str = "{}", setup: str = "", **changes: Any
) -> Iterator[Cluster]:
    """Yields a ready cluster, which is ended with all its processes after the block.

    Args:
        setup: Python code that the launcher runs first.
    """
    path = write_yaml(folder, **changes)
    environment = {**os.environ, "TMPDIR": str(temporary), "PRISM_FAKE": fake}
    log = folder / "serve.log"
    command = [*serve_command(setup), "--config", str(path), "--log-dir", str(folder / "logs")]
    with running(command, log, environment) as process:
        cluster = Cluster(process, temporary, log)
        cluster.await_ready()
        yield cluster


@contextmanager
def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command in the block. Terminates it at the end, and kills it if it does not exit."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            finally:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Provides one cluster for those tests of a module that leave it running."""
    from tempfile import TemporaryDirectory

    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(tmp_path_factory.mktemp("cluster"), Path(temporary)) as made,
    ):
        yield made
