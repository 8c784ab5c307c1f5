"""A stand-in for SGLang's compiled kernels (the distribution `sglang-kernel`), in plain torch.

SGLang imports 33 symbols of `sgl_kernel` when its CUDA path is imported. On a machine where the
real wheel (373 MB, tied to one version of torch) cannot be installed, this package answers those
imports. Functions that plain Llama and Qwen models can reach compute the documented result with
torch operations, which CUDA graphs can capture. All others raise NotImplementedError at the call.

It is for checks, not for serving: it is slow. Run SGLang on it with `attention_backend=triton`,
`sampling_backend=pytorch`, without prefill graphs, and with SGLANG_FORCE_FUSED_OP_BACKEND=torch.

A symbol that is not listed here does not exist, so that SGLang's own `except ImportError` branches
find out. Its wheel carries the real distribution's name, so pip never installs both; a second copy
elsewhere on the path makes this import fail.
"""

from __future__ import annotations

from sgl_kernel import distribution as _distribution
from sgl_kernel.activations import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from sgl_kernel.matrices import fp8_scaled_mm
from sgl_kernel.missing import missing as _missing
from sgl_kernel.moe import moe_sum, moe_sum_reduce
from sgl_kernel.norms import (
    fused_add_rmsnorm,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    rmsnorm,
)
from sgl_kernel.sampling import top_k_renorm_prob, top_p_renorm_prob
from sgl_kernel.weak_reference import weak_ref_tensor

_distribution.refuse_beside_the_real_one()

int8_scaled_mm = _missing("int8_scaled_mm")
merge_state_v2 = _missing("merge_state_v2")

__all__ = [
    "fp8_scaled_mm",
    "fused_add_rmsnorm",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "int8_scaled_mm",
    "merge_state_v2",
    "moe_sum",
    "moe_sum_reduce",
    "rmsnorm",
    "silu_and_mul",
    "top_k_renorm_prob",
    "top_p_renorm_prob",
    "weak_ref_tensor",
]
