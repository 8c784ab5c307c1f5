"""What Ray runs on a machine, without Ray."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from prism.serve.node_part import NodePart, Said
from prism.serve.run_dir import LOCK_FILE, lock
from tests.serve.conftest import until


def end_of(part: NodePart) -> Said:
    lines: list[str] = []
    code: list[int | None] = [None]

    def ended() -> bool:
        said = part.look()
        lines.extend(said.lines)
        code[0] = said.code
        return said.code is not None

    until(ended, "its end", 60)
    part._console.close()
    return Said(tuple(lines), code[0])


def test_folders_of_killed_parts_are_swept_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own goes with it; a file that is refused is one line and exit code 2."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left, living, strange = (tmp_path / f"prism-node-{name}" for name in ("a", "b", "c"))
    for folder in (left, living, strange):
        folder.mkdir(mode=0o700)
    (left / LOCK_FILE).touch()
    held = lock(living)
    assert held is not None
    part = NodePart("nodes: []", "k" * 40, "a", [])
    assert not left.exists()
    own = set(tmp_path.iterdir()) - {living, strange}
    assert len(own) == 1
    said = end_of(part)
    assert said.code == 2, said
    assert len(said.lines) == 1
    assert "error: " in said.lines[0]
    assert set(tmp_path.iterdir()) == {living, strange}
    os.close(held)


def test_a_part_is_not_swept_while_its_launcher_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose lock the launcher has inherited: Ray's worker may have ended before."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("prism.serve.node_part._LAUNCHER", "import time; time.sleep(600)")
    part = NodePart("nodes: []", "k" * 40, "a", [])
    (own,) = tmp_path.iterdir()
    time.sleep(0.5)  # the waiter starts it
    assert part._lock_fd is not None
    os.close(part._lock_fd)
    try:
        assert lock(own) is None
    finally:
        part.signal(15)
        end_of(part)
