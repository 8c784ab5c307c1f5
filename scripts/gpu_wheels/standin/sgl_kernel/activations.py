"""Gated activations. The last dimension has the half of the gate, then the half that it scales."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import gelu, silu


def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes `silu(first half) * second half`, into `out` if given."""
    return _gated(silu, input, out)


def gelu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes `gelu(first half) * second half` with the exact GELU, into `out` if given."""
    return _gated(gelu, input, out)


def gelu_tanh_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes `gelu(first half) * second half` with GELU's tanh form, into `out` if given."""
    return _gated(lambda gate: gelu(gate, approximate="tanh"), input, out)


def _gated(
    activation: Callable[[torch.Tensor], torch.Tensor],
    input: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:
    gate, scaled = input.float().chunk(2, dim=-1)
    result = (activation(gate) * scaled).to(input.dtype)
    return result if out is None else out.copy_(result)
