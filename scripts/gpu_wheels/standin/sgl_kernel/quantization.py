"""Kernels for GGUF weights: none of them in the stand-in."""

from __future__ import annotations

from sgl_kernel.missing import missing

ggml_dequantize = missing("quantization.ggml_dequantize")
ggml_moe_a8 = missing("quantization.ggml_moe_a8")
ggml_mul_mat_a8 = missing("quantization.ggml_mul_mat_a8")
ggml_mul_mat_vec_a8 = missing("quantization.ggml_mul_mat_vec_a8")
