"""Products of matrices with scales, computed in float32."""

from __future__ import annotations

import torch


def fp8_scaled_mm(  # noqa: PLR0917 (its signature)
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scales_a: torch.Tensor,
    scales_b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `(mat_a * scales_a) @ (mat_b * scales_b) + bias`, with a scale for each row of
    `mat_a` and each column of `mat_b`."""
    product = (mat_a.float() @ mat_b.float()) * scales_a.view(-1, 1) * scales_b.view(1, -1)
    return (product if bias is None else product + bias.float()).to(out_dtype)
