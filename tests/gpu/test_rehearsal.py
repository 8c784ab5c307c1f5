"""Rehearsal of the GPU tests without a GPU, on the test libcuda under the name libcuda.so.1.

The rehearsal checks the tests themselves. Those of torch use the double of its CUDA front.
NVIDIA's bindings check that kvcached's declarations and the test library mean the same structures.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kvcached.compiling import ROOT
from tests.torchcuda import cuda_environment

# All tests, each parameter counted. None is skipped for lack of bindings or of torch's CUDA.
TESTS = 22


@pytest.mark.timeout(600)  # most of it is compiling
def test_the_gpu_tests_pass_on_the_test_libcuda() -> None:
    env = cuda_environment(
        # The options of tests/kvcached/test_cpp.py, whose build is reused.
        KVCACHED_TEST_SANITIZERS="address,undefined",
        # Page tables cost memory, as on a GPU.
        KVCACHED_TEST_CUDA_TABLE_BYTES=str(512 << 10),
    )
    del env["KVCACHED_LIBCUDA"]  # found by its name, as the real driver is
    tests = sorted((ROOT / "tests/gpu").glob("test_*.py"))
    tests.remove(Path(__file__))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"{TESTS} passed in "), done.stdout
