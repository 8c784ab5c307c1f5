"""The sum over a token's experts: `input` is (tokens, experts of a token, hidden)."""

from __future__ import annotations

import torch


def moe_sum(input_tensor: torch.Tensor, output_tensor: torch.Tensor) -> None:
    """Writes the sum to `output_tensor` (tokens, hidden)."""
    output_tensor.copy_(input_tensor.float().sum(dim=1))


def moe_sum_reduce(
    input_tensor: torch.Tensor, output_tensor: torch.Tensor, routed_scaling_factor: float = 0
) -> None:
    """Writes the sum times the factor to `output_tensor` (tokens, hidden)."""
    output_tensor.copy_(input_tensor.float().sum(dim=1) * routed_scaling_factor)
