"""Where there is no GPU, the GPU tests run on the test libcuda, which is called libcuda.so.1 there.

So the tests themselves are known to work, and NVIDIA's bindings, where they are installed, check
that kvcached's declarations and the test library mean the same structures.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kvcached.compiling import ROOT, build_libcuda


@pytest.mark.timeout(600)  # most of it is compiling
def test_the_gpu_tests_pass_on_the_test_libcuda(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").symlink_to(build_libcuda())
    env = {name: value for name, value in os.environ.items() if name != "KVCACHED_LIBCUDA"}
    # The C++ tests as tests/kvcached/test_cpp.py builds them, rather than once more.
    env["KVCACHED_TEST_SANITIZERS"] = "address,undefined"
    env["LD_LIBRARY_PATH"] = str(tmp_path)
    env["KVCACHED_TEST_CUDA_GRANULARITY"] = str(2 << 20)
    env["KVCACHED_TEST_CUDA_TABLE_BYTES"] = str(512 << 10)
    tests = [str(path) for path in sorted((ROOT / "tests/gpu").glob("test_*.py"))]
    tests.remove(__file__)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "7 passed" in done.stdout or "14 passed" in done.stdout, done.stdout
