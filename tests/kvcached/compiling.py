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
FLAGS = ["-std=c++20", "-g1", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread"]
STEPS = ["-O1", "-DKVCACHED_STEPS"]
LIBCUDA = ROOT / "tests" / "libcuda"


def layers() -> list[Path]:
    """The sources of kvcached without its bindings."""
    return sorted(path for path in (ROOT / "csrc").glob("*.cpp") if "bindings" not in path.name)


def digest(sources: list[Path], flags: list[str]) -> str:
    """Names one state of the sources, of every header, and of the flags."""
    folders = {ROOT / "csrc", ROOT / "tests" / "cpp", LIBCUDA, *(path.parent for path in sources)}
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
    for old in BUILD.glob(f"{name}-{'?' * 16}{suffix}"):
        old.unlink(missing_ok=True)
    with ThreadPoolExecutor(2) as workers:
        objects = list(workers.map(lambda source: compiled(source, flags), sources))
    partial = BUILD / f"{name}-{uuid4().hex[:8]}.part"
    subprocess.run([compiler(), *flags, *objects, "-o", str(partial), "-ldl"], check=True)
    os.replace(partial, product)
    return product


def compiled(source: Path, flags: list[str]) -> str:
    """The source's object, which every program of the same flags is linked from."""
    folder = BUILD / f"objects-{hashlib.sha256(' '.join(flags).encode()).hexdigest()[:8]}"
    target = folder / f"{source.stem}-{digest([source], flags)}.o"
    if not target.exists():
        folder.mkdir(exist_ok=True)
        for old in folder.glob(f"{source.stem}-{'?' * 16}.o"):
            old.unlink(missing_ok=True)
        partial = folder / f"{source.stem}.{uuid4().hex[:8]}.part"
        includes = (ROOT / "csrc", ROOT / "tests" / "cpp", LIBCUDA)
        include = [word for path in includes for word in ("-I", str(path))]
        command = [compiler(), *flags, *include, "-c", str(source), "-o", str(partial)]
        subprocess.run(command, check=True)
        os.replace(partial, target)
    return str(target)


def build_tests(sanitizers: str = "") -> Path:
    """The C++ test program."""
    sources = layers() + sorted((ROOT / "tests" / "cpp").glob("*.cpp"))
    name = f"tests-{sanitizers.replace(',', '-') or 'plain'}"
    return build(name, sources, sanitized(sanitizers) if sanitizers else STEPS)


def sanitized(sanitizers: str = "address,undefined") -> list[str]:
    return ["-O1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]


def build_program(name: str, flags: list[str]) -> Path:
    """The program of the folder tests/NAME."""
    sources = [*layers(), ROOT / "tests" / "cpp" / "check.cpp"]
    sources += sorted((ROOT / "tests" / name).glob("*.cpp"))
    return build(name, sources, flags)


def build_kills() -> Path:
    """The program that kills processes at every step of csrc."""
    return build_program("kills", STEPS)


def build_race() -> Path:
    """The program of processes that want more than there is."""
    return build_program("race", STEPS)


def build_fuzz() -> Path:
    """The program that damages segments."""
    return build_program("fuzz", sanitized())


def build_libcuda() -> Path:
    """The test libcuda: CUDA's memory calls on host memory."""
    flags = ["-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
    return build("libcuda", sorted(LIBCUDA.glob("*.cpp")), flags, ".so")
