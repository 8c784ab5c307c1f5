"""The C++ layers' own tests, built with sanitizers from the sources at hand."""

from __future__ import annotations

import subprocess

import pytest

from .compiling import build_tests

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)  # most of it is compiling
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_cpp_layers(sanitizers: str, libcuda: object) -> None:
    """Runs with all tests: a fresh clone does not know whether csrc changed since the last run."""
    program = build_tests(sanitizers)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "host: conforms to vmm.h",
        "host below faults: conforms to vmm.h",
        "cuda: conforms to vmm.h",
        "cuda below faults: conforms to vmm.h",
        "all C++ tests passed",
    ]
