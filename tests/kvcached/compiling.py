"""Builds the C++ of the tests with CMake (tests/CMakeLists.txt).

`python -m tests.kvcached.compiling` builds all of it ahead of the tests.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BUILD = ROOT / "build" / "cpp-tests"
FLAGS = ("-DPRISM_CPP_TESTS=ON", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1 -g1")
STEPS = "-DPRISM_STEPS=ON"
# Optimising what sanitizers add takes longer than running it as it is.
SANITIZED = ("-DCMAKE_CXX_FLAGS=-O0 -g1",)


def compiler() -> str:
    """Returns the path of $CXX if that is a program, otherwise of c++ or g++."""
    names = (os.environ.get("CXX"), "c++", "g++")
    found = next(filter(None, (shutil.which(name) for name in names if name)), None)
    assert found is not None, "building kvcached takes a C++ compiler; install one"
    return found


@cache  # one test process sees one state of the sources
def build(tree: str, target: str, product: str, *options: str, source: Path = ROOT) -> Path:
    """Builds `target` and returns the path of `product`. Several processes may build at once.

    A tree is one set of options."""
    mark = hashlib.sha256(" ".join([compiler(), *options]).encode()).hexdigest()[:8]
    folder = BUILD / f"{tree}-{mark}"
    folder.mkdir(parents=True, exist_ok=True)
    # This Python's cmake and ninja, wherever the shell's PATH points to, or the machine's.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    env = os.environ | {"PATH": path, "CXX": compiler()}
    cmake, ninja = (shutil.which(name, path=path) for name in ("cmake", "ninja"))
    lacks = "building the tests takes cmake and ninja; install both"
    assert cmake is not None, lacks
    assert ninja is not None, lacks
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_configured(folder, ninja):
            own = f"-DCMAKE_MAKE_PROGRAM:FILEPATH={ninja}"
            configure = [cmake, "-S", source, "-B", folder, "-G", "Ninja", own, *options]
            subprocess.run(configure, check=True, env=env, stdout=subprocess.DEVNULL)
        command = [cmake, "--build", folder, "--target", target]
        done = subprocess.run(command, check=False, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return folder / "products" / product


def is_configured(folder: Path, ninja: str) -> bool:
    """Returns whether a tree is configured with this ninja. Another one may be removed."""
    cache = folder / "CMakeCache.txt"
    kept = cache.read_text() if cache.exists() else ""
    return (folder / "build.ninja").exists() and f"CMAKE_MAKE_PROGRAM:FILEPATH={ninja}\n" in kept


def build_layers(tree: str, target: str, *options: str, product: str = "") -> Path:
    return build(tree, target, product or target, *FLAGS, *options)


def build_tests(sanitizers: str = "") -> Path:
    """Builds the C++ test program."""
    if sanitizers:
        tree = sanitizers.replace(",", "-")
        return build_layers(tree, "tests", *SANITIZED, f"-DPRISM_SANITIZE={sanitizers}")
    return build_layers("steps", "tests", STEPS)


def build_kills() -> Path:
    """Builds the program that kills processes at every step of csrc."""
    return build_layers("steps", "kills", STEPS)


def build_race() -> Path:
    """Builds the program of processes that request more than the device has."""
    return build_layers("steps", "race", STEPS)


def build_fuzz() -> Path:
    """Builds the program that damages segments."""
    options = (*SANITIZED, "-DPRISM_SANITIZE=address,undefined")
    return build_layers("address-undefined", "fuzz", *options)


def build_libcuda() -> Path:
    """Builds the test libcuda: CUDA's calls on host memory.

    Only processes of this test run share its devices."""
    keep_own_book()
    return build_layers("doubles", "test_libcuda", product="libcuda.so.1")


def build_libnvml() -> Path:
    """Builds NVML's calls on the devices of the test libcuda, in the same folder."""
    keep_own_book()
    return build_layers("doubles", "test_libnvml", product="libnvidia-ml.so.1")


def restart_libnvml() -> None:
    """Makes the next use of NVML initialise the test libnvml again, which then reads its settings.

    Otherwise this happens once per process."""
    from kvcached.driver import nvml  # the sources compile before kvcached is built

    if nvml._loaded.cache_info().currsize:
        nvml.load()._call("nvmlShutdown")
        nvml._loaded.cache_clear()


def keep_own_book() -> None:
    """Names the file of the devices' memory (tests/libcuda/book.h) for this process and those that
    it starts."""
    if "KVCACHED_TEST_CUDA_BOOK" not in os.environ:
        book = Path(f"/dev/shm/test-libcuda-{os.getpid()}.book")
        os.environ["KVCACHED_TEST_CUDA_BOOK"] = str(book)
        atexit.register(book.unlink, missing_ok=True)


def main() -> None:
    from tests.torchcuda.building import build_front

    for make in (build_libcuda, build_libnvml, build_kills, build_race, build_fuzz):
        make()
    build_tests("address,undefined")
    build_tests("thread")
    build_front()  # last: torch may be installed in the meantime


if __name__ == "__main__":
    main()
