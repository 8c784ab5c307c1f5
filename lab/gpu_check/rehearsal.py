"""Environment of a machine with a GPU, made of doubles of the driver's libraries and of torch's
CUDA front."""

from __future__ import annotations

import os
from typing import Any

from lab.gpu_check.report import DOUBLES_VARIABLE, ROOT
from lab.gpu_check.sizes import GIB


def environment(gpu_bytes: int = 4 * GIB, **settings: Any) -> dict[str, str]:
    """Returns the environment of subprocesses. The dynamic linker finds the libraries by their
    names, since tests/gpu refuses a driver that a variable names."""
    from tests.torchcuda import cuda_environment

    env = cuda_environment(devices=1, bytes=gpu_bytes, **settings)
    del env["KVCACHED_LIBCUDA"], env["KVCACHED_LIBNVML"]
    # The double of NVIDIA's MPS control comes before one that this machine has.
    env["PATH"] = os.pathsep.join((str(ROOT / "tests/gpu_check/mps"), env["PATH"]))
    # The options of tests/kvcached/test_cpp.py, whose build is reused.
    return {**env, "KVCACHED_TEST_SANITIZERS": "address,undefined", DOUBLES_VARIABLE: "1"}
