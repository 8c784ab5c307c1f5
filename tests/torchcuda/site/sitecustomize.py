"""Puts the double of torch's CUDA front in place as soon as a process imports torch.

Python imports this module at its start when the folder is on PYTHONPATH (see
`tests.torchcuda.cuda_environment`); the processes that it starts in turn have it as well.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types


class _WithinTorch(importlib.abc.MetaPathFinder):
    """Acts at two points of `import torch`.

    torch._C keeps the CUDA hooks that it finds when it is loaded, so ours must be registered by
    then. The names in torch._C must be there before torch.cuda looks for them.
    """

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "torch._C":
            ctypes.CDLL(os.environ["TORCHCUDA_FRONT"])
        elif fullname == "torch.cuda":
            sys.meta_path.remove(self)
            import torchcuda_front

            torchcuda_front.install()


class _WithoutCutlass(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """SGLang imports its fused kernels for Blackwell GPUs, which need CUTLASS, whenever it builds a
    model with a gated MLP, and then uses none for float32."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "sglang.kernels.ops.gemm.cutedsl_dual_gemm":
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def exec_module(self, module: types.ModuleType) -> None:
        for name in ("MAX_DUAL_GEMM_DECODE_TOKENS", "DualGemmQuantMode", "can_use_dual_gemm"):
            setattr(module, name, None)


class _Float8(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """SGLang compiles its kernel that quantises activations with nvcc."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "sglang.kernels.ops.quantization.per_token_quant_fp8":
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def exec_module(self, module: types.ModuleType) -> None:
        import torchcuda_float8

        vars(module)["per_token_quant_fp8"] = torchcuda_float8.per_token_quant_fp8


class _Vllm(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that vLLM imports for any model on a GPU, and that its CPU build cannot import:
    kernels, FlashAttention, which no server here chooses, and the warm-up of compiled kernels."""

    NAMES = (
        "vllm._C_stable_libtorch",
        "vllm.vllm_flash_attn._vllm_fa2_C",
        "vllm.model_executor.warmup.kernel_warmup",
    )

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.NAMES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == self.NAMES[0]:
            import torchcuda_vllm  # noqa: F401
        vars(module)["kernel_warmup"] = lambda worker: None


if os.environ.get("TORCHCUDA_FRONT"):
    # Imports make a million objects and no garbage; looking for it takes a third of their time.
    gc.set_threshold(100_000, 50, 100)
    sys.meta_path.insert(0, _WithinTorch())
    sys.meta_path.insert(0, _Float8())
    sys.meta_path.insert(0, _Vllm())
    if importlib.util.find_spec("cutlass") is None:
        sys.meta_path.insert(0, _WithoutCutlass())
