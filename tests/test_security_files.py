"""Files and shared memory: this user's alone."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvcached
from kvcached.errors import InvalidArgumentError, KvcachedError
from kvcached.weights.store import WeightStore
from prism.engines.kv_moves import kv_file
from prism.process import flush_log, open_log
from tests.strangers import as_nobody, give_to_nobody, needs_root

GEOMETRY = {"capacity_bytes": 1 << 20, "page_bytes": 1 << 16}


def refused(act: object) -> bool:
    """Returns whether the system keeps this process from opening the file."""
    try:
        os.close(os.open(str(act), os.O_RDONLY))
    except PermissionError:
        return True
    return False


# --- shared memory -------------------------------------------------------------------------------


def test_a_ledger_is_this_users_alone_whatever_the_umask(namespace: str) -> None:
    before = os.umask(0)
    try:
        device = kvcached.Device.open("host:0", namespace=namespace, **GEOMETRY)
    finally:
        os.umask(before)
    path = kvcached.segment_path("host:0", namespace)
    assert path.stat().st_mode & 0o777 == 0o600
    device.destroy()


@needs_root
@pytest.mark.parametrize("geometry", [GEOMETRY, {}], ids=["create", "attach"])
def test_a_ledger_of_another_user_is_not_used(namespace: str, geometry: dict[str, int]) -> None:
    """Refuses it even if this process may open it: its owner could change it at any time."""
    kvcached.Device.open("host:0", namespace=namespace, **GEOMETRY).close()
    path = give_to_nobody(kvcached.segment_path("host:0", namespace))
    try:
        with pytest.raises(KvcachedError, match=r"no permission on .*another namespace"):
            kvcached.Device.open("host:0", namespace=namespace, **geometry)
    finally:
        path.unlink()


# --- KV of requests that move --------------------------------------------------------------------

ROWS = np.arange(64, dtype=np.uint8).reshape(8, 8)


@needs_root
def test_kv_of_a_request_is_read_by_nobody_else(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = kv_file.save(str(tmp_path / "moves"), [ROWS], 1)
    finally:
        os.umask(before)
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "moves").stat().st_mode & 0o777 == 0o700
    assert as_nobody(lambda: refused(path))


@needs_root
def test_kv_goes_into_no_folder_of_another_user(tmp_path: Path) -> None:
    folder = tmp_path / "moves"
    folder.mkdir(mode=0o777)
    old = folder / "old.npy"
    old.touch()
    os.utime(old, (0, 0))
    give_to_nobody(folder)
    assert kv_file.save(str(folder), [ROWS], 1) == ""
    assert [path.name for path in folder.iterdir()] == ["old.npy"]


def test_a_request_names_no_other_file(tmp_path: Path) -> None:
    """Requests come by way of Redis."""
    mine = tmp_path / "thesis.npy"
    np.save(mine, ROWS[None])
    assert kv_file.take(str(mine), 1, 8, 8) is None
    assert mine.exists()


# --- the weight store ----------------------------------------------------------------------------


@needs_root
def test_weights_of_another_user_are_not_served(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    give_to_nobody(folder)
    with pytest.raises(InvalidArgumentError, match=r"belongs to another user.*another directory"):
        WeightStore.open(folder)
    assert list(folder.iterdir()) == []


def test_a_store_that_everybody_may_change_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidArgumentError, match="can be modified by every user"):
        WeightStore.open(tmp_path)


# --- logs and core files -------------------------------------------------------------------------


def test_a_log_without_room_on_the_disk_goes_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def full(path: str | Path, *arguments: int) -> int:
        if str(path) != os.devnull:
            raise OSError(28, "No space left on device")
        return opened(path, *arguments)

    monkeypatch.setattr("prism.process.os.open", full)
    log_fd = open_log(tmp_path / "part.log")
    monkeypatch.undo()
    assert os.write(log_fd, b"said") == 4
    os.close(log_fd)


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_the_last_words_of_an_engine_are_no_reason_to_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors at that point would make a forked engine continue as its fork server."""
    monkeypatch.setattr(sys, "stderr", FullDisk())
    flush_log()


CRASH = """
import os, sys
from prism.process import keep_private
keep_private(core_dumps=len(sys.argv) > 1)
open("made", "w").close()
os.abort()
"""


@pytest.mark.parametrize("allowed", [False, True])
def test_a_crash_leaves_no_core_file_unless_that_is_wanted(tmp_path: Path, allowed: bool) -> None:
    def dumping() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))

    crash = [sys.executable, "-c", CRASH, *(["yes"] if allowed else [])]
    done = subprocess.run(crash, cwd=tmp_path, preexec_fn=dumping, timeout=60, check=False)
    assert done.returncode == -6
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600
    cores = [path.name for path in tmp_path.iterdir() if path.name != "made"]
    into_files = not Path("/proc/sys/kernel/core_pattern").read_text().startswith(("|", "/"))
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    assert len(cores) == (allowed and into_files and hard != 0)
