"""Logs of running processes are bounded."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from prism.process import private_log
from prism.serve.processes import logs
from prism.serve.processes.logs import log_names, rotate_full

NAMES = log_names(["part"], ["host:0"])

WRITER = (
    "import sys\nfor line in sys.stdin: print('said', line, end='', file=sys.stderr, flush=True)"
)


def test_a_full_log_goes_on_in_an_empty_file(tmp_path: Path) -> None:
    path, old = tmp_path / "part.log", tmp_path / "part.log.1"
    with private_log(path) as log:
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stderr=log, text=True
        )
    with writer:
        assert writer.stdin is not None

        def say(line: str) -> None:
            assert writer.stdin is not None
            size = path.stat().st_size
            writer.stdin.write(f"{line}\n")
            writer.stdin.flush()
            while path.stat().st_size == size:
                pass

        for line in ("first", "second"):
            say(line)
            rotate_full(tmp_path, NAMES, 100)
            assert path.stat().st_size > 0
            rotate_full(tmp_path, NAMES, 5)
            assert (path.read_text(), old.read_text()) == ("", f"said {line}\n")
        say("third")
        writer.stdin.close()
        writer.wait()
    assert path.read_text() == "said third\n"
    assert old.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_is_gone_is_no_error(tmp_path: Path) -> None:
    assert rotate_full(tmp_path / "gone", NAMES) == ""


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    ours = {"part.log", "host0-e12.log", "host0-e3.1.log"}
    foreign = {"other.log", "xpart.log", "host1-e0.log", "host0-ex.log", "part.log.1.log"}
    for name in ours | foreign:
        (tmp_path / name).write_text("much too long")
    assert rotate_full(tmp_path, NAMES, 5) == ""
    assert {path.name for path in tmp_path.iterdir() if not path.stat().st_size} == ours
    assert not any((tmp_path / f"{name}.1").exists() for name in foreign)


def test_links_and_devices_are_left_alone(tmp_path: Path) -> None:
    diary, kept = tmp_path / "diary", tmp_path / "kept"
    for path in (diary, kept):
        path.write_text("much too long")
    (tmp_path / "host0-e0.log").symlink_to(diary)
    os.mkfifo(tmp_path / "host0-e1.log")
    (tmp_path / "host0-e2.log").mkdir()
    (tmp_path / "part.log").write_text("also too long")
    (tmp_path / "part.log.1").symlink_to(kept)
    assert rotate_full(tmp_path, NAMES, -1) == ""
    assert (diary.read_text(), kept.read_text()) == ("much too long", "much too long")
    assert not (tmp_path / "part.log.1").is_symlink()
    assert (tmp_path / "part.log.1").read_text() == "also too long"


def test_a_full_disk_empties_the_log_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "part.log"
    path.write_text("much too long")
    monkeypatch.setattr(logs.shutil, "copyfileobj", no_room)
    assert rotate_full(tmp_path, NAMES, 5) == "part.log: No space left on device"
    assert {entry.name: entry.stat().st_size for entry in tmp_path.iterdir()} == {"part.log": 0}
    assert rotate_full(tmp_path, NAMES, 5) == ""
