"""Preparation of `import sglang`: environment variables, and stand-ins for libraries that a machine
without a GPU lacks."""

from __future__ import annotations

import importlib.util
import os

from kvcached.engines import stand_ins
from prism.engines.sglang.platform import gpu
from prism.engines.sglang.platform.supported_models import VECTORS_KEPT_MIB

PLATFORM_ENTRY_POINT = "prism_cpu"

_ENVIRONMENT = {
    # A model may be served with a few more positions than its config has: SGLang reserves some.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    # Process groups of one rank never communicate, but gloo opens a port for each, and NCCL one for
    # several. They use the loopback interface.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # Number of prompt positions whose log probabilities are computed at once. Each takes one
    # float32 per vocabulary entry.
    "SGLANG_LOGPROB_CHUNK_SIZE": "256",
    # Log probabilities before temperature, as in OpenAI's API.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    # Vectors of images that are kept on the device for the next chunk of a prompt, in MiB.
    "SGLANG_VLM_CACHE_SIZE_MB": str(VECTORS_KEPT_MIB),
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}

_WITHOUT_GPU = {
    "SGLANG_PLATFORM": PLATFORM_ENTRY_POINT,
    # Inductor needs a real Triton; without one a compiled function fails at its first call.
    "TORCHDYNAMO_DISABLE": "1",
}


def install() -> None:
    """Sets the environment variables and the stand-ins. REQUIRES: sglang is not imported yet, and
    SGLANG_PLATFORM is set for a GPU."""
    on_gpu = os.environ.get("SGLANG_PLATFORM") == gpu.PLATFORM_ENTRY_POINT
    for name, value in (_ENVIRONMENT if on_gpu else _ENVIRONMENT | _WITHOUT_GPU).items():
        os.environ.setdefault(name, value)
    stand_ins.install_for_sglang()


def install_after_import() -> None:
    """Disables fused kernels that need CUTLASS if it is not installed: SGLang imports these kernels
    for Blackwell GPUs for every model with a gated MLP on CUDA, also on other GPUs."""
    if importlib.util.find_spec("cutlass") is None:
        from sglang.srt.layers.dual_gemm import DualGemm

        DualGemm._select_mode = lambda self, gate_up_proj, hidden_size: None
