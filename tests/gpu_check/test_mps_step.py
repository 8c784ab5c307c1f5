"""Step "mps" of scripts/gpu-check: the daemon, with a double of NVIDIA's program, and wrong answers
of clients. The whole step runs in test_whole.py."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.gpu_check.memory import mps
from lab.gpu_check.memory.mps_client import Worker
from lab.gpu_check.rehearsal import environment
from lab.gpu_check.report import ROOT
from lab.gpu_check.sizes import GIB
from tests.gpu_check.steps import report_in, run

DOUBLE = ROOT / "tests" / "gpu_check" / "mps"
PAGES = 100


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str = "") -> Iterator[mps.Daemon]:
    """Yields a daemon of the double that is not started, and kills it at the end."""
    monkeypatch.setenv("PATH", f"{DOUBLE}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MPS_DOUBLE", fault)
    made = mps.Daemon(folder / "mps")
    try:
        yield made
    finally:
        made.kill()


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[mps.Daemon]:
    yield from opened(tmp_path, monkeypatch)


@pytest.fixture
def faulty(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[mps.Daemon]:
    yield from opened(tmp_path, monkeypatch, request.param)


# --- the daemon ------------------------------------------------------------------------------


def test_a_daemon_starts_and_leaves_nothing(daemon: mps.Daemon) -> None:
    assert daemon.processes() == []
    daemon.start()
    [server] = daemon.servers()
    assert server in daemon.processes()
    daemon.quit()
    assert daemon.processes() == []


@pytest.mark.parametrize("faulty", ["broken"], indirect=True)
def test_a_daemon_that_does_not_start_says_why(faulty: mps.Daemon) -> None:
    with pytest.raises(RuntimeError, match="does not start: no GPU for you"):
        faulty.start()


@pytest.mark.parametrize("faulty", ["stubborn"], indirect=True)
def test_a_daemon_that_does_not_quit_is_reported_and_killed(
    faulty: mps.Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "QUIT_S", 0.2)
    faulty.start()
    with pytest.raises(RuntimeError, match=r"does not end, \[\d+.* are left: .*control daemon"):
        faulty.quit()
    faulty.kill()
    deadline_s = time.monotonic() + 30
    while faulty.processes():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


# --- what clients answer ---------------------------------------------------------------------


class Stub:
    """Client with a prepared answer for the first word of each question."""

    def __init__(self, **answers: Any) -> None:
        self.killed_s = 0.0
        self.sent: list[str] = []
        self._answers = answers

    def send(self, question: str) -> None:
        self.sent.append(question)

    def answer(self, question: str = "", timeout_s: float = 0.0) -> str:
        if not question and not self.sent:
            return "ready"
        found = self._answers[(question or self.sent[-1]).split()[0]]
        return json.dumps(found() if callable(found) else found)

    def kill(self) -> float:
        self.killed_s = time.monotonic()
        return 0.0


def worked(steps: int = 100, *, right: bool = True, granted_s: float | None = None) -> Any:
    return {"steps": steps, "seconds": 2.0, "right": right, "granted_s": granted_s}


def stub(**changes: Any) -> Stub:
    found = {"page": [9, 9], "hole": [0, 0]}
    answers = {"compute": worked(), "holes": found, "hold": {}, "busy": {}}
    return Stub(**answers | {"take": lambda: worked(granted_s=time.monotonic())} | changes)


def test_rates_are_of_one_client_and_of_both() -> None:
    assert mps.rates_of([stub(), stub(compute=worked(40))], 1.0) == {"alone": 50.0, "both": 70.0}


@pytest.mark.parametrize("found", [{"hole": [0, 9]}, {"hole": [9, 0]}, {"page": [0, 9]}])
def test_holes_that_are_not_zeros_are_reported(found: dict[str, Any]) -> None:
    right = {"page": [9, 9], "hole": [0, 0]}
    assert mps.holes(stub()) == right
    with pytest.raises(RuntimeError, match="not as 0 and 9"):
        mps.holes(stub(holes=right | found))


def test_seconds_until_memory_is_had_count_from_the_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "BUSY_S", 0.0)
    victim, other = stub(), stub()
    assert 0 <= mps.killed([victim, other], PAGES) < 60
    assert victim.killed_s > 0
    assert other.sent == ["take 0.0 60"]


# --- each check ------------------------------------------------------------------------------


WRONG = [
    ("side_by_side", "wrong results", {"compute": worked(right=False)}),
    ("guarded_holes", "not as 0 and 9", {"holes": {"page": [9, 9], "hole": [0, 1]}}),
    ("killed_client", "wrong results", {"take": worked(right=False, granted_s=1e12)}),
    ("killed_client", "did not get its memory", {"take": worked()}),
    ("killed_client", "granted what the other client held", {"take": worked(granted_s=0.0)}),
]


def checked(
    tmp_path: Path, daemon: Any, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> dict[str, str]:
    """Returns the checks by name. `changes` are answers of the clients of MPS."""

    @contextmanager
    def client_process(pipe: Path, *_: object) -> Iterator[Stub]:
        yield stub(**changes) if pipe == daemon.pipe else stub()

    @contextmanager
    def namespace_of(_pages: int) -> Iterator[str]:
        yield "n"

    monkeypatch.setattr(mps, "client_process", client_process)
    monkeypatch.setattr(mps, "namespace_of", namespace_of)
    monkeypatch.setattr(mps, "BUSY_S", 0.0)
    report = report_in(tmp_path, "mps")
    with ExitStack() as stack:
        mps.clients(report, daemon, stack, PAGES)
    return report.checks


def test_what_is_right_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = SimpleNamespace(pipe=tmp_path / "pipe", servers=lambda: [1])
    names = ["side_by_side", "guarded_holes", "killed_without_mps", "killed_client"]
    assert checked(tmp_path, daemon, monkeypatch) == dict.fromkeys(names, "passed")


@pytest.mark.parametrize(("check", "says", "changes"), WRONG, ids=lambda value: str(value)[:30])
def test_what_is_wrong_fails_its_check(
    check: str,
    says: str,
    changes: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    daemon = SimpleNamespace(pipe=tmp_path / "pipe", servers=lambda: [1])
    checks = checked(tmp_path, daemon, monkeypatch, **changes)
    failed = {name: text for name, text in checks.items() if text != "passed"}
    assert list(failed) == [check]
    assert says in failed[check]


@pytest.mark.parametrize("faulty", ["idle"], indirect=True)
def test_clients_that_use_no_server_are_reported(
    faulty: mps.Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.start()
    checks = checked(tmp_path, faulty, monkeypatch)
    assert "the clients do not use MPS" in checks["side_by_side"]
    faulty.quit()


def test_memory_that_does_not_come_back_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "QUIT_S", 0.1)
    report = report_in(tmp_path, "mps")
    driver: Any = SimpleNamespace(free_bytes=lambda: 2 * GIB)
    mps.kept(report, driver, 2 * GIB + mps.SLACK_BYTES)
    with pytest.raises(RuntimeError, match="bytes are not back"):
        mps.kept(report, driver, 2 * GIB + mps.SLACK_BYTES + 1)


def test_a_client_notices_a_wrong_product() -> None:
    torch = pytest.importorskip("torch")
    worker = Worker.__new__(Worker)
    worker._torch = torch
    worker._left, worker._right = torch.ones(2, 3), torch.ones(3, 2)
    worker._expected = torch.full((2, 2), 3.0)
    assert worker.compute("0.01")["right"]
    worker._left[1, 1] = 0
    assert not worker.compute("0.01")["right"]


# --- where it cannot run ---------------------------------------------------------------------


def test_a_machine_without_mps_is_named(tmp_path: Path) -> None:
    env = environment(GIB)
    paths = env["PATH"].split(os.pathsep)
    env["PATH"] = os.pathsep.join(path for path in paths if path != str(DOUBLE))
    found = run("mps", env, tmp_path)
    assert found["status"] == "skipped"
    assert "nvidia-cuda-mps-control is not on the PATH" in found["reason"]
