"""Exhausted disk, shared memory or file descriptors: other processes work on, and it recovers."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from prism.process import OPEN_FILES_MAX
from prism.serve.launcher import _say
from tests.serve.conftest import Cluster, alive, serving, until
from tests.serve.test_hangs import killed_and_replaced, served
from tests.serve.test_secrets import engine_of
from tests.strangers import needs_root

FULL = Path("/dev/full")
PARTS = ("prism.cluster", "prism.agent", "prism.frontend")
LOGS = ["scheduler", "agent-host0", "frontend-f0", *(f"host0-e{i}" for i in range(20))]


# --- the disk of the logs ------------------------------------------------------------------------


def test_a_full_disk_under_the_logs_ends_and_stalls_nothing(
    tmp_path: Path, short_dir: Path
) -> None:
    """Fails every write to a log from the start, and ends and starts every kind of process."""
    (tmp_path / "logs").mkdir()
    for name in LOGS:
        (tmp_path / "logs" / f"{name}.log").symlink_to(FULL)
    with serving(tmp_path, short_dir) as cluster:
        assert served(cluster, "a")
        assert served(cluster, "b")
        engine = engine_of(cluster)
        os.kill(engine, signal.SIGKILL)
        until(lambda: not alive(engine), "the end of an engine")
        until(lambda: served(cluster, "a"), "another engine", 60)
        for name in PARTS:
            killed_and_replaced(cluster, name, signal.SIGKILL)
        until(lambda: served(cluster, "a") and served(cluster, "b"), "serving", 90)
        assert not cluster.output().count("exit code")
    assert cluster.process.returncode == 0


def test_the_launchers_own_output_may_be_full() -> None:
    with FULL.open("w") as full:
        _say(Console(file=full), "ended; restarting")
        with pytest.raises(OSError, match="No space left"):
            full.close()


# --- shared memory -------------------------------------------------------------------------------


OWN_SHM = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
assert not libc.unshare(0x20000), os.strerror(ctypes.get_errno())  # CLONE_NEWNS
assert not libc.mount(b"none", b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
assert not libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=24m")
"""


def fill(folder: Path) -> None:
    free = os.statvfs(folder)
    with (folder / "another-programs").open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
        assert os.statvfs(folder).f_bavail == 0


@needs_root
def test_shared_memory_is_full(tmp_path: Path, short_dir: Path) -> None:
    """Serves, evicts and activates models. A new agent gets the memory of its predecessor."""
    with serving(tmp_path, short_dir, '{"load_weights": true}', OWN_SHM) as cluster:
        assert served(cluster, "a")
        fill(Path("/proc", str(cluster.process.pid), "root", "dev", "shm"))
        assert served(cluster, "a")
        assert cluster.operate("evict", "a").returncode == 0
        assert cluster.operate("activate", "a").returncode == 0
        assert served(cluster, "a")
        assert served(cluster, "b")
        killed_and_replaced(cluster, "prism.agent", signal.SIGKILL)
        until(lambda: served(cluster, "a"), "serving", 120)


# --- open files ----------------------------------------------------------------------------------


@contextmanager
def without_descriptors(pid: int) -> Iterator[None]:
    """Prevents a process from opening files in this block.

    Descriptors 0 to 2 are open. poll(2) accepts at most as many as the limit, and libzmq passes it
    that many.
    """
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    yield
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_an_agent_without_descriptors_goes_on_with_what_is_open(cluster: Cluster) -> None:
    agent = cluster.child("prism.agent")
    assert served(cluster, "a")
    with without_descriptors(agent):
        assert served(cluster, "a")
        assert cluster.operate("evict", "a").returncode == 0
        assert served(cluster, "a")
    assert served(cluster, "b")
    assert cluster.child("prism.agent") == agent


def test_an_agent_that_can_take_no_engine_is_replaced(tmp_path: Path, short_dir: Path) -> None:
    """Relies on libzmq, which ends a process without a descriptor for a new connection."""
    with serving(tmp_path, short_dir) as cluster:
        assert served(cluster, "a")
        agent = cluster.child("prism.agent")
        with without_descriptors(agent):
            os.kill(engine_of(cluster), signal.SIGKILL)
            until(lambda: not alive(agent), "the end of the agent", 60)
        until(lambda: served(cluster, "a") and served(cluster, "b"), "serving", 90)


def test_parts_may_open_as_many_files_as_the_system_allows(cluster: Cluster) -> None:
    for name in PARTS:
        soft, hard = resource.prlimit(cluster.child(name), resource.RLIMIT_NOFILE)
        assert soft == min(hard, OPEN_FILES_MAX)


def test_a_frontend_without_descriptors_finishes_what_it_has(cluster: Cluster) -> None:
    """Serves open connections. New ones wait or are closed until there are descriptors again."""
    frontend = cluster.child("prism.frontend")
    body = {"model": "a", "prompt": [9, 8, 7], "max_tokens": 12}
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        assert client.post("/v1/completions", json=body).status_code == 200
        with without_descriptors(frontend):
            assert client.post("/v1/completions", json=body).status_code == 200
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{cluster.url}/v1/models", timeout=2)
            assert client.post("/v1/completions", json=body).status_code == 200
        assert client.post("/v1/completions", json=body).status_code == 200
    until(lambda: served(cluster, "a"), "new connections", 60)
    assert cluster.child("prism.frontend") == frontend
