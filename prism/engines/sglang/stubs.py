"""What must be in place before `import sglang` on a machine without a GPU.

Two things that SGLang imports at module level do not exist there: Triton (SGLang carries a
stand-in for macOS, used here through a finder of our own) and torchvision's compiled operators
(only their schemas are needed). `install` is idempotent and does nothing where the real ones are.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path

from prism.engines.sglang import gpu
from prism.models.hugging_face import declare_torchvision_operators

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
    _stand_in_for_triton()
    declare_torchvision_operators()


def install_after_import() -> None:
    """SGLang imports its fused kernels for Blackwell GPUs whenever it builds a model with a gated
    MLP on CUDA, whatever the GPU. Where CUTLASS, which they need, is missing, models do without."""
    if importlib.util.find_spec("cutlass") is None:
        from sglang.srt.layers.dual_gemm import DualGemm

        DualGemm._select_mode = lambda self, gate_up_proj, hidden_size: None


class _TritonStandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers every `import triton...` with SGLang's mock module."""

    def __init__(self, stubs: types.ModuleType) -> None:
        self._stubs = stubs

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "triton":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module: types.ModuleType = self._stubs._MockModule(spec.name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "triton":
            module.__version__ = "3.0.0"  # type: ignore[attr-defined]
            module.cdiv = self._stubs._cdiv  # type: ignore[attr-defined]
            module.next_power_of_2 = self._stubs._next_power_of_2  # type: ignore[attr-defined]
            module.Config = self._stubs._Config  # type: ignore[attr-defined]
        elif module.__name__ in ("triton.compiler.compiler", "triton.runtime.cache"):
            module.triton_key = self._stubs._triton_key  # type: ignore[attr-defined]


def _stand_in_for_triton() -> None:
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        return
    sys.meta_path.insert(0, _TritonStandIn(_load_sglang_stubs()))


def _load_sglang_stubs() -> types.ModuleType:
    """SGLang's own stubs file, loaded alone: importing the package would need Triton already."""
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("sglang is not installed: install the engine's requirements")
    path = Path(package.origin).with_name("_platform_stubs.py")
    spec = importlib.util.spec_from_file_location("prism._sglang_platform_stubs", path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"sglang's installation has no readable {path.name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
