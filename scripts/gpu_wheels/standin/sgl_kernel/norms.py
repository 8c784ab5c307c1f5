"""Root-mean-square norms over the last dimension, computed in float32."""

from __future__ import annotations

import torch


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Computes `input / rms(input) * weight`, into `out` if given."""
    return _into(out, _normalised(input.float(), weight.float(), eps).to(input.dtype))


def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Computes `input / rms(input) * (1 + weight)`, into `out` if given."""
    return _into(out, _normalised(input.float(), weight.float() + 1, eps).to(input.dtype))


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Computes `residual += input`, then `input = rmsnorm(residual)`, in place."""
    _add_and_normalise(input, residual, weight.float(), eps)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Computes `residual += input`, then `input = gemma_rmsnorm(residual)`, in place."""
    _add_and_normalise(input, residual, weight.float() + 1, eps)


def _add_and_normalise(
    input: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor, eps: float
) -> None:
    """Normalises the sum before rounding it to the residual's type."""
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(_normalised(total, scale, eps))


def _normalised(values: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    mean_square = values.square().mean(dim=-1, keepdim=True)
    return values * torch.rsqrt(mean_square + eps) * scale


def _into(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    return result if out is None else out.copy_(result)
