"""The stock wheel is enough; if ever not, patches stay small and apply to the pristine files."""

from __future__ import annotations

import base64
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


def test_patches_apply_to_the_pristine_wheel(tmp_path: Path) -> None:
    installed = metadata.distribution("sglang")
    for name in {file for diff in diffs() for file in files_of(diff)}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed.locate_file(name), tmp_path / name)
    for diff in diffs():
        subprocess.run(["patch", "-p1", "-i", diff], cwd=tmp_path, check=True)


def test_the_installed_wheel_is_pristine() -> None:
    """Every Python file has the hash that the wheel's RECORD gives."""
    files = [f for f in metadata.files("sglang") or [] if f.suffix == ".py" and f.hash]
    assert len(files) > 1000
    altered = [str(f) for f in files if f.hash and _hash(Path(f.locate())) != f.hash.value]
    assert not altered


def _hash(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
