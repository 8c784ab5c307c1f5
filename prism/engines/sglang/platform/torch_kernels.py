"""Kernels in plain torch, for models whose own need Triton, on a host device."""

from __future__ import annotations

import torch
from sglang.kernels.ops.activation import softcap
from sglang.kernels.ops.elementwise import elementwise
from sglang.srt.layers import logits_processor


def install() -> None:
    """Replaces the kernels. REQUIRES: SGLang's models are not imported yet."""
    softcap.softcap_inplace_logits = _softcap
    logits_processor.fused_softcap = _softcap
    elementwise.fused_gate_sigmoid_mul = _gate
    elementwise.fused_gate_sigmoid_mul_add = _gate_and_add


def _softcap(full_logits: torch.Tensor, final_logit_softcapping: float) -> torch.Tensor:
    """Bounds logits (tokens, vocabulary) smoothly, in place (Gemma 2)."""
    return full_logits.div_(final_logit_softcapping).tanh_().mul_(final_logit_softcapping)


def _gate(
    hidden_states: torch.Tensor, gate_weight: torch.Tensor, shared_output: torch.Tensor
) -> torch.Tensor:
    """Returns a shared expert's output (tokens, hidden), times the sigmoid of its gate."""
    return torch.sigmoid(hidden_states @ gate_weight)[:, None] * shared_output


def _gate_and_add(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Adds the gated output of a shared expert to that of the routed ones (Qwen2-MoE)."""
    final_hidden_states.add_(_gate(hidden_states, gate_weight, shared_output))
