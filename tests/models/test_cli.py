"""`prism-models` by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prism.cli.models", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_list_says_what_is_ready(tmp_path: Path) -> None:
    assert "ready" not in run("list", "--dir", str(tmp_path)).stdout
    assert run("prepare", "tiny-gpt2", "--dir", str(tmp_path)).returncode == 0
    lines = run("list", "--dir", str(tmp_path)).stdout.splitlines()
    assert [line.split()[0] for line in lines if "ready" in line] == ["tiny-gpt2"]
    assert len(lines) == 4


def test_an_unknown_name_lists_those_that_exist(tmp_path: Path) -> None:
    done = run("prepare", "tiny-lama", "--dir", str(tmp_path / "new"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "tiny-lama" in done.stderr
    assert "tiny-llama" in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_one_line() -> None:
    done = run("prepare", "tiny-gpt2", "--dir", "/proc/x")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "/proc/x: No such file or directory; choose a folder with --dir" in done.stderr


def test_making_a_model_without_torch_is_one_line(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; import prism.cli.models as c; c.main()"
    command = [sys.executable, "-c", code, "prepare", "tiny-gpt2", "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "making models needs the package torch; run scripts/install" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_command_starts_without_torch() -> None:
    code = "import sys, prism.cli.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
