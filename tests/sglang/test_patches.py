"""The stock wheel is enough; otherwise patches stay small and apply to the pristine files."""

from __future__ import annotations

import base64
import difflib
import hashlib
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang

VERSION = "0.5.23"
PATCHES = Path(__file__).parents[2] / "patches" / f"sglang-{VERSION}"
CHANGED_LINES_MAX = 22


def diffs() -> list[Path]:
    return sorted(PATCHES.glob("*.diff"))


def changed_lines(diff: Path) -> int:
    lines = diff.read_text().splitlines()
    return sum(li[:1] in "+-" and li[:3] not in ("+++", "---") for li in lines if li)


def files_of(diff: Path) -> list[str]:
    lines = diff.read_text().splitlines()
    return [li.split()[1].removeprefix("a/") for li in lines if li.startswith("--- a/")]


def test_the_directory_is_for_the_installed_version() -> None:
    assert metadata.version("sglang") == VERSION
    assert (PATCHES / "README.md").is_file()


def test_patches_are_as_small_as_promised() -> None:
    assert sum(changed_lines(diff) for diff in diffs()) <= CHANGED_LINES_MAX


def copy_of_pristine(folder: Path, files: set[str]) -> Path:
    installed = metadata.distribution("sglang")
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(str(installed.locate_file(name)), folder / name)
    return folder


def applies(diff: Path, folder: Path) -> bool:
    command = ["patch", "-p1", "--forward", "--fuzz=0", "-i", str(diff)]
    return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0


def test_patches_apply_to_the_pristine_wheel(tmp_path: Path) -> None:
    """Shows that the check can fail: a made-up patch applies once and not twice."""
    name, made = "sglang/utils.py", tmp_path / "000-made-up.diff"
    folder = copy_of_pristine(tmp_path, {name, *(f for diff in diffs() for f in files_of(diff))})
    lines = (folder / name).read_text().splitlines(keepends=True)
    changed = ["# changed\n", *lines]
    made.write_text("".join(difflib.unified_diff(lines, changed, f"a/{name}", f"b/{name}")))
    assert (files_of(made), changed_lines(made)) == ([name], 1)
    assert [applies(diff, folder) for diff in (*diffs(), made)] == [True] * (len(diffs()) + 1)
    assert (folder / name).read_text() == "".join(changed)
    assert not applies(made, folder)


def test_the_installed_wheel_is_pristine() -> None:
    """Checks each Python file against the hash in the wheel's RECORD."""
    files = [f for f in metadata.files("sglang") or [] if f.suffix == ".py" and f.hash]
    assert len(files) > 1000
    altered = [str(f) for f in files if f.hash and _hash(Path(f.locate())) != f.hash.value]
    assert not altered


def _hash(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
