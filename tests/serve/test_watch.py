"""Launcher's checks while the cluster runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from prism.config.schema.cluster_config import ClusterConfig
from prism.messages.troubles import read_troubles, write_troubles
from prism.serve import launcher
from prism.serve.launcher import Maintenance
from prism.serve.node.run_dir import RunDir
from prism.serve.processes.logs import log_names
from prism.serve.processes.supervisor import Supervisor

ENDED = {"redis": "ended"}
NAMES = log_names(["part"], [])


class Fixed(Supervisor):
    """Supervisor that always finds the same troubles."""

    def __init__(self) -> None:
        super().__init__([], None, lambda _: None)

    def watch(self, now_s: float) -> None:
        self.troubles = ENDED


@pytest.fixture
def run_dir(short_dir: Path) -> Iterator[RunDir]:
    made = RunDir.create(short_dir / "run")
    yield made
    made.remove()


def watch(run_dir: RunDir) -> Maintenance:
    path = str(run_dir.path)
    config = ClusterConfig("prism-test", path, "", "prism", devices=[], models=[])
    return Maintenance(Fixed(), run_dir, config, NAMES, lambda _: None)


def test_troubles_that_could_not_be_written_are_written_later(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    look = watch(run_dir)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(launcher, "write_troubles", full)
        for _ in range(3):
            look()
    assert read_troubles(run_dir.path) == {}
    assert [record.getMessage() for record in caplog.records] == [
        "the state of the processes cannot be written: no space left"
    ]
    look()
    assert read_troubles(run_dir.path) == ENDED


def test_troubles_that_were_removed_or_are_old_are_written_again(run_dir: RunDir) -> None:
    look = watch(run_dir)
    look()
    (run_dir.path / "troubles.json").unlink()
    look()
    assert read_troubles(run_dir.path) == ENDED
    write_troubles(run_dir.path, {"frontend-f0": "ended"})
    look()
    assert read_troubles(run_dir.path) == ENDED


def test_a_log_that_cannot_be_kept_is_reported_once(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launcher, "_LOGS_INTERVAL_S", 0)
    look, problem = watch(run_dir), "part.log: no room"
    found = [problem, problem, "", problem]
    monkeypatch.setattr(
        launcher, "rotate_full", lambda folder, names: found.pop() if names is NAMES else ""
    )
    with caplog.at_level(logging.WARNING):
        while found:
            look()
    assert [record.getMessage() for record in caplog.records] == [
        f"logs cannot be rotated: {problem}"
    ] * 2
