"""Environment of a machine with a GPU, made of doubles: the driver's libraries under their own
names, and torch's CUDA front over them."""

from __future__ import annotations

import os
from typing import Any

from scripts.gpu_check.report import DOUBLES_VARIABLE, ROOT
from scripts.gpu_check.sizes import GIB


def environment(gpu_bytes: int = 4 * GIB, **settings: Any) -> dict[str, str]:
    """Returns that of subprocesses. The dynamic linker finds the libraries, as on a real machine:
    tests/gpu refuses a driver that a variable names."""
    from tests.torchcuda import cuda_environment

    env = cuda_environment(devices=1, bytes=gpu_bytes, **settings)
    del env["KVCACHED_LIBCUDA"], env["KVCACHED_LIBNVML"]
    # NVIDIA's MPS control, and nothing that a machine may have of it.
    env["PATH"] = os.pathsep.join((str(ROOT / "tests/gpu_check/mps"), env["PATH"]))
    # The C++ tests as tests/kvcached/test_cpp.py builds them, rather than once more.
    return {**env, "KVCACHED_TEST_SANITIZERS": "address,undefined", DOUBLES_VARIABLE: "1"}
