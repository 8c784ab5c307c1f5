"""Double of CUDA for a CPU build of torch: torch.cuda over the test libcuda."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.kvcached.compiling import build_libcuda, build_libnvml
from tests.torchcuda.building import build_front

HERE = Path(__file__).parent
SITE = HERE / "site"
ROOT = HERE.parent.parent
MIB = 1 << 20


def cuda_environment(**settings: Any) -> dict[str, str]:
    """Returns the environment of a process that sees GPUs, with the settings of `variables`."""
    return dict(os.environ) | variables(**settings)


def variables(
    devices: int = 2,
    bytes: int = 1 << 30,
    context_bytes: int = 64 * MIB,
    graph_bytes: int = 2 * MIB,
    **more: str,
) -> dict[str, str]:
    """Returns the variables of a process that sees GPUs of `bytes` each.

    `more` sets further variables; KVCACHED_TEST_CUDA_* are listed in tests/libcuda/settings.h.
    """
    standin = ROOT / "scripts" / "gpu_wheels" / "standin"
    libraries = build_libcuda().parent
    paths = [str(SITE), str(standin), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TORCHCUDA_FRONT": str(build_front()),
        "KVCACHED_LIBCUDA": str(build_libcuda()),
        "KVCACHED_LIBNVML": str(build_libnvml()),
        "LD_LIBRARY_PATH": os.pathsep.join(
            path for path in (str(libraries), os.environ.get("LD_LIBRARY_PATH", "")) if path
        ),
        "KVCACHED_TEST_CUDA_BOOK": os.environ["KVCACHED_TEST_CUDA_BOOK"],
        "KVCACHED_TEST_CUDA_DEVICES": str(devices),
        "KVCACHED_TEST_CUDA_BYTES": str(bytes),
        "KVCACHED_TEST_CUDA_CONTEXT_BYTES": str(context_bytes),
        "KVCACHED_TEST_CUDA_GRAPH_BYTES": str(graph_bytes),
        "KVCACHED_TEST_CUDA_GRANULARITY": str(2 * MIB),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
        # A path where no folder can be made, since kernels of nvcc need a real GPU.
        "SGLANG_JIT_CACHE_DIR": "/dev/null/none",
    } | more
