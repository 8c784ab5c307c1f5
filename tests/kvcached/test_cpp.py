"""The C++ layers' own tests, built with sanitizers from the sources at hand."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FLAGS = ["-std=c++20", "-g", "-O0", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread"]


def sources() -> list[Path]:
    layers = [path for path in (ROOT / "csrc").glob("*.cpp") if "bindings" not in path.name]
    return sorted(layers) + sorted((ROOT / "tests" / "cpp").glob("*.cpp"))


def build(sanitizers: str) -> Path:
    """The test program; built once for each state of the sources."""
    headers = [*(ROOT / "csrc").glob("*.h"), *(ROOT / "tests" / "cpp").glob("*.h")]
    content = b"".join(path.read_bytes() for path in sources() + sorted(headers))
    digest = hashlib.sha256(content + " ".join([*FLAGS, sanitizers]).encode()).hexdigest()[:16]
    program = ROOT / "build" / "cpp-tests" / f"{sanitizers.replace(',', '-')}-{digest}"
    if program.exists():
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    for old in program.parent.glob(f"{sanitizers.replace(',', '-')}-*"):
        old.unlink()
    compile_all(program, [*FLAGS, f"-fsanitize={sanitizers}", "-I", str(ROOT / "csrc")])
    return program


def compile_all(program: Path, flags: list[str]) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None, "building kvcached takes a C++ compiler; install one"

    def compile_one(source: Path) -> str:
        target = f"{program}-{source.stem}.o"
        subprocess.run([compiler, *flags, "-c", str(source), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(2) as workers:
        objects = list(workers.map(compile_one, sources()))
    subprocess.run([compiler, *flags, *objects, "-o", str(program)], check=True)


@pytest.mark.timeout(900)  # most of it is compiling
@pytest.mark.parametrize(
    "sanitizers", ["address,undefined", pytest.param("thread", marks=pytest.mark.long)]
)
def test_cpp_layers(sanitizers: str) -> None:
    done = subprocess.run([build(sanitizers)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "all C++ tests passed" in done.stdout
