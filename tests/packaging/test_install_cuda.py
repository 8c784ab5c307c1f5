"""`scripts/install --cuda`: its lock is SGLang's own pins, and bad machines get one line each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from .pythons import interpreter

ROOT = Path(__file__).parent.parent.parent
INSTALL = ROOT / "scripts" / "install"
LOCK = ROOT / "requirements" / "lock-cuda.txt"
PYTHONS = ("3.11", "3.12")
# Every CUDA machine that SGLang's wheels run on; the running one may have another processor.
MARKERS = {"sys_platform": "linux", "platform_machine": "x86_64", "extra": ""}


def lines_of(path: Path) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, str]:
    """Maps the names in the lock to versions."""
    versions = {}
    for line in lines_of(LOCK):
        (pin,) = line.specifier
        assert pin.operator == "==", line
        versions[canonical(line.name)] = pin.version
    return versions


def unmet(requirements: list[Requirement]) -> list[str]:
    return [
        str(needed)
        for needed in requirements
        if needed.marker is None or needed.marker.evaluate(MARKERS)
        if not satisfied(needed)
    ]


def satisfied(needed: Requirement) -> bool:
    version = locked().get(canonical(needed.name))
    return version is not None and needed.specifier.contains(version, prereleases=True)


def test_the_lock_is_what_sglang_asks_for() -> None:
    """Reads the installed SGLang's metadata, whose requirements the CPU installation ignores."""
    assert metadata.version("sglang") == locked()["sglang"]
    asked = [Requirement(text) for text in metadata.requires("sglang") or ()]
    assert len(asked) > 60
    assert unmet(asked) == []


def test_the_lock_holds_what_prism_and_its_build_ask_for() -> None:
    listed = subprocess.run(
        [sys.executable, "scripts/list_requirements.py", "serve"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    asked = [Requirement(line) for line in listed.stdout.splitlines()]
    for name in ("cuda.txt", "build.txt"):
        asked += lines_of(ROOT / "requirements" / name)
    assert unmet(asked) == []


def test_a_requirement_that_the_lock_lacks_is_found() -> None:
    asked = ["torch==2.13.0", "not-there", "numpy", "av==1; platform_machine == 'aarch64'"]
    assert unmet([Requirement(text) for text in asked]) == ["torch==2.13.0", "not-there"]


def install(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(INSTALL), *options],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def fake_python(folder: Path, version: str) -> Path:
    """Makes a wrapper of the running Python that reports another version."""
    path = folder / "python"
    question = "'import sys; print(\"%d.%d\" % sys.version_info[:2])'"
    path.write_text(
        f'#!/bin/sh\n[ "$2" = {question} ] && echo {version} && exit\nexec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_another_python_is_one_line(tmp_path: Path, version: str) -> None:
    python = fake_python(tmp_path, version)
    done = install("--cuda", "--check", "--python", str(python), "--venv", str(tmp_path / "none"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("install: Python 3.12 or 3.11 is needed (SGLang 0.5.23 has no")


@pytest.mark.parametrize("version", PYTHONS)
def test_a_machine_that_has_all_installs_nothing(tmp_path: Path, version: str) -> None:
    """Succeeds without a driver, too: one may install before the GPU is there, or in an image."""
    python = fake_python(tmp_path, version)
    venv = tmp_path / "none"
    done = install("--cuda", "--check", "--python", str(python), "--venv", str(venv))
    assert done.returncode == 0, done.stderr
    assert "nothing is missing" in done.stdout
    warned = done.stderr.splitlines()
    assert len(warned) <= 1
    assert all("install: warning: " in line and "NVIDIA driver" in line for line in warned)
    assert not venv.exists()


def test_a_driver_older_than_cuda_13_is_one_warning(tmp_path: Path) -> None:
    """Provides the library (the C library under its name) and an nvidia-smi that reports a
    version."""
    libc = next(Path("/").glob("lib*/x86_64-linux-gnu/libc.so.6"), None)
    if libc is None:
        pytest.skip("the C library is not where Debian keeps it")
    (tmp_path / "libcuda.so.1").symlink_to(libc)
    smi = tmp_path / "nvidia-smi"
    for version, warned in (("570.86.10", True), ("580.159.03", False)):
        smi.write_text(f"#!/bin/sh\necho {version}\n")
        smi.chmod(0o755)
        done = install(
            *("--cuda", "--check", "--python", sys.executable, "--venv", str(tmp_path / "none")),
            PATH=f"{tmp_path}:{os.environ['PATH']}",
            LD_LIBRARY_PATH=str(tmp_path),
        )
        assert done.returncode == 0, done.stderr
        assert (f"NVIDIA driver {version} is older than 580" in done.stderr) == warned
        assert done.stderr.count("\n") == int(warned)


@pytest.mark.parametrize("found", [True, False])
def test_nvcc_without_a_toolkit_is_one_warning(tmp_path: Path, found: bool) -> None:
    """Puts a wrapper named nvcc on the PATH, whose toolkit is found or not."""
    nvcc, python = tmp_path / "nvcc", tmp_path / "python"
    nvcc.write_text("#!/bin/sh\n")
    asks = '[ "$1" = prism/engines/cuda_toolkit.py ]'
    python.write_text(f'#!/bin/sh\n{asks} && exit {int(not found)}\nexec {sys.executable} "$@"\n')
    for program in (nvcc, python):
        program.chmod(0o755)
    done = install(
        *("--cuda", "--check", "--python", str(python), "--venv", str(tmp_path / "none")),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "NVIDIA driver" not in line]
    assert len(told) == int(not found)
    assert all(line.startswith(f"install: warning: {nvcc} is not part of a CUDA") for line in told)
    assert all("set CUDA_HOME to the toolkit's folder" in line for line in told)


def test_no_compiler_is_one_line(tmp_path: Path) -> None:
    done = install(
        *("--cuda", "--check", "--python", sys.executable, "--venv", str(tmp_path / "none")),
        CXX="no-such-compiler",
    )
    assert done.returncode == 2
    assert done.stderr == ("install: a C++20 compiler is needed; on Debian: apt-get install g++\n")


def test_options_that_do_not_go_together() -> None:
    done = install("--cuda", "--torch-index", "https://example.invalid")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--torch-index is for torch's CPU build" in done.stderr


@pytest.mark.parametrize("option", ["--torch-index", "--python", "--venv"])
def test_an_option_without_its_value_is_one_line(option: str) -> None:
    for given in ([option], [option, ""]):
        done = install(*given)
        assert done.returncode == 2
        assert re.fullmatch(rf"install: {option} takes a (URL|path)\n", done.stderr)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", PYTHONS)
def test_pip_resolves_to_the_lock(tmp_path: Path, version: str) -> None:
    """Resolves with pip itself, on the package index, for each available Python; installs nothing.

    `--no-deps` is left out, so pip would add what the lock lacks and refuse what disagrees.
    """
    python = interpreter(version)
    report = tmp_path / "report.json"
    pip = [python, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed"]
    done = subprocess.run(
        [*pip, "--only-binary=:all:", "--report", str(report), "-r", str(LOCK)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert resolved(report) <= set(locked().items())


def resolved(report: Path) -> set[tuple[str, str]]:
    items = json.loads(report.read_text())["install"]
    return {(canonical(i["metadata"]["name"]), i["metadata"]["version"]) for i in items}
