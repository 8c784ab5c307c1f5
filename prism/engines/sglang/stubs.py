"""What must be in place before `import sglang`: the environment, and stand-ins for what a machine
without a GPU lacks."""

from __future__ import annotations

import importlib.util
import os

from kvcached.engines import stand_ins
from prism.engines.sglang import gpu

PLATFORM_ENTRY_POINT = "prism_cpu"

_ENVIRONMENT = {
    # A model may be served with a few more positions than its config says: SGLang keeps two back.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    # The process groups of one rank never talk, but gloo opens a port for each, and NCCL one for
    # several: on loopback.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # Positions of a prompt whose log probabilities are computed at once: each takes a vocabulary of
    # float32.
    "SGLANG_LOGPROB_CHUNK_SIZE": "256",
    # Log probabilities are those before temperature, as OpenAI's are.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}

_WITHOUT_GPU = {
    "SGLANG_PLATFORM": PLATFORM_ENTRY_POINT,
    # Inductor needs a real Triton; without one a compiled function fails at its first call.
    "TORCHDYNAMO_DISABLE": "1",
}


def install() -> None:
    """Set the environment and the stand-ins. REQUIRES: sglang is not imported yet, and
    SGLANG_PLATFORM names the platform of a GPU if it is for one."""
    on_gpu = os.environ.get("SGLANG_PLATFORM") == gpu.PLATFORM_ENTRY_POINT
    for name, value in (_ENVIRONMENT if on_gpu else _ENVIRONMENT | _WITHOUT_GPU).items():
        os.environ.setdefault(name, value)
    stand_ins.install_for_sglang()


def install_after_import() -> None:
    """SGLang imports its fused kernels for Blackwell GPUs whenever it builds a model with a gated
    MLP on CUDA, whatever the GPU. Where CUTLASS, which they need, is missing, models do without."""
    if importlib.util.find_spec("cutlass") is None:
        from sglang.srt.layers.dual_gemm import DualGemm

        DualGemm._select_mode = lambda self, gate_up_proj, hidden_size: None
