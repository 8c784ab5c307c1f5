"""Builds the C++ of the tests from the sources at hand, once for each state of them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

ROOT = Path(__file__).parent.parent.parent
BUILD = ROOT / "build" / "cpp-tests"
FLAGS = ["-std=c++20", "-g", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread"]
LIBCUDA = ROOT / "tests" / "libcuda"


def layers() -> list[Path]:
    """The sources of kvcached without its bindings."""
    return sorted(path for path in (ROOT / "csrc").glob("*.cpp") if "bindings" not in path.name)


def digest(sources: list[Path], flags: list[str]) -> str:
    """Names one state of the sources, the headers beside them, and the flags."""
    folders = {source.parent for source in sources} | {LIBCUDA}
    headers = sorted(header for folder in folders for header in folder.glob("*.h"))
    content = b"".join(path.read_bytes() for path in [*sources, *headers])
    return hashlib.sha256(content + " ".join(flags).encode()).hexdigest()[:16]


def compiler() -> str:
    found = shutil.which("c++") or shutil.which("g++")
    assert found is not None, "building kvcached takes a C++ compiler; install one"
    return found


def build(name: str, sources: list[Path], flags: list[str], suffix: str = "") -> Path:
    """A program or library; one that several processes build at once is whole all the same."""
    flags = [*FLAGS, *flags]
    product = BUILD / f"{name}-{digest(sources, flags)}{suffix}"
    if product.exists():
        return product
    BUILD.mkdir(parents=True, exist_ok=True)
    for old in BUILD.glob(f"{name}-*"):
        old.unlink(missing_ok=True)
    partial = BUILD / f"{name}-{uuid4().hex[:8]}.part"
    objects = compile_all(partial, sources, flags)
    subprocess.run([compiler(), *flags, *objects, "-o", str(partial), "-ldl"], check=True)
    os.replace(partial, product)
    for compiled in objects:
        Path(compiled).unlink()
    return product


def compile_all(partial: Path, sources: list[Path], flags: list[str]) -> list[str]:
    folders = (ROOT / "csrc", ROOT / "tests" / "cpp", LIBCUDA)
    include = [word for folder in folders for word in ("-I", str(folder))]

    def compile_one(source: Path) -> str:
        target = f"{partial}-{source.stem}.o"
        command = [compiler(), *flags, *include, "-c", str(source), "-o", target]
        subprocess.run(command, check=True)
        return target

    with ThreadPoolExecutor(2) as workers:
        return list(workers.map(compile_one, sources))


def build_tests(sanitizers: str = "") -> Path:
    """The C++ test program."""
    flags = ["-O0", f"-fsanitize={sanitizers}"] if sanitizers else ["-O1"]
    sources = layers() + sorted((ROOT / "tests" / "cpp").glob("*.cpp"))
    return build(f"tests-{sanitizers.replace(',', '-') or 'plain'}", sources, flags)


def build_program(name: str, *flags: str) -> Path:
    """The program of the folder tests/NAME."""
    sources = [*layers(), ROOT / "tests" / "cpp" / "check.cpp"]
    sources += sorted((ROOT / "tests" / name).glob("*.cpp"))
    return build(name, sources, ["-O1", *flags])


def build_kills() -> Path:
    """The program that kills processes at every step of csrc."""
    return build_program("kills", "-DKVCACHED_STEPS")


def build_race() -> Path:
    """The program of processes that want more than there is."""
    return build_program("race")


def build_fuzz() -> Path:
    """The program that damages segments: little patience with a mutex, and sanitizers."""
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    return build_program("fuzz", "-DKVCACHED_PATIENCE_MS=20", *sanitizers)


def build_libcuda() -> Path:
    """The test libcuda: CUDA's memory calls on host memory."""
    flags = ["-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
    return build("libcuda", sorted(LIBCUDA.glob("*.cpp")), flags, ".so")
