"""Kernels in plain torch, for a CPU: SGLang's own need Triton, or a CPU with AMX.

Those of linear attention and Mamba compute one token after another.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
from sglang.kernels.ops.attention.fla.layernorm_gated import RMSNorm
from sglang.kernels.ops.elementwise import elementwise
from sglang.srt.layers import logits_processor
from sglang.srt.layers.attention.linear import gdn_backend
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
from sglang.srt.layers.attention.mamba import causal_conv1d, mamba
from sglang.srt.layers.moe import fused_moe_native, topk
from sglang.srt.layers.rotary_embedding import get_rope, get_rope_wrapper
from sglang.srt.models import (
    deepseek_v2,
    gemma4_causal,
    llama4,
    minimax_m2,
    qwen2_moe,
    qwen3_5,
    qwen3_next,
)
from torch.nn import functional

from kvcached.engines.recurrences import delta_rule, delta_step, gates, sequences

_ATEN = torch.library.Library("aten", "IMPL")  # which registers while it is alive


def install() -> None:
    """Replaces the kernels in the modules that call them. Idempotent."""
    causal_conv1d._causal_conv1d_fn_triton = convolve
    causal_conv1d._causal_conv1d_update_triton = convolve_next
    for module in (gdn_backend, mamba):
        module.causal_conv1d_fn = convolve
        module.causal_conv1d_update = convolve_next
    mamba.causal_conv1d_fn_triton = convolve
    mamba.causal_conv1d_update_triton = convolve_next
    logits_processor.fused_softcap = softcap
    qwen2_moe.fused_gate_sigmoid_mul = shared_expert
    qwen2_moe.fused_gate_sigmoid_mul_add = add_shared_expert
    mamba.mamba_chunk_scan_combined = scan
    mamba.selective_state_update = scan_next
    gdn_backend.fused_gdn_gating = gates
    TritonGDNKernel.extend = extend_delta_rule
    TritonGDNKernel.packed_decode = delta_rule_next
    FusedRMSNormGated.forward = RMSNorm.forward = gated_norm
    topk.fused_topk_native = choose_experts
    fused_moe_native.moe_forward_native = mix_experts
    deepseek_v2.get_rope_wrapper = positions_of_latents
    gemma4_causal.Gemma4Router.forward = route
    llama4.Llama4Attention.forward = attend_by_parts
    minimax_m2.rms_sumsq_serial, minimax_m2.rms_apply_serial = square_sums, norm_by_sums
    _register_multiply()
    qwen3_next.fused_qkvzba_split_reshape_cat = split_groups
    qwen3_5.fused_qkvzba_split_reshape_cat_contiguous = split
    qwen3_5.fused_sigmoid_mul = elementwise.fused_sigmoid_mul = gate


@cache
def _register_multiply() -> None:
    _ATEN.impl("mm.dtype", multiply, "CPU")


# --- attention and norms -------------------------------------------------------------------------


def positions_of_latents(*args: Any, device: str, **kwargs: Any) -> Any:
    """Returns SGLang's embedding of positions. Of those for a CPU there is only YaRN's."""
    if kwargs.get("rope_scaling") is None:
        return get_rope(*args, **kwargs)
    return get_rope_wrapper(*args, device=device, **kwargs)


def multiply(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the product of two matrices in `dtype`, which torch computes on a GPU only."""
    return a.to(dtype) @ b.to(dtype)


def attend_by_parts(
    layer: Any, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any
) -> torch.Tensor:
    """Returns Llama 4's attention (tokens, hidden). SGLang's expects rotary positions to change Q
    and K in place, and norms them in bfloat16."""
    qkv, _ = layer.qkv_proj(hidden_states)
    q, k, v = qkv.split([layer.q_size, layer.kv_size, layer.kv_size], dim=-1)
    if layer.rotary_emb is not None:
        q, k = layer.rotary_emb(positions, q, k)
    if layer.qk_norm is not None:
        q, k = (layer.qk_norm(x.unflatten(-1, (-1, layer.head_dim))).flatten(1) for x in (q, k))
    if layer.attn_temperature_tuning and not layer.use_rope:
        q = (q * layer._get_attn_scale(positions)).to(q.dtype)
    out, _ = layer.o_proj(layer.attn(q, k, v, forward_batch))
    return out


def square_sums(x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """Returns the sums of squares of each row (2, tokens), in float32."""
    return torch.stack([x.float().square().sum(-1) for x in (x1, x2)])


def norm_by_sums(  # noqa: PLR0917 (SGLang's signature)
    x1: torch.Tensor,
    x2: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    sum_sq: torch.Tensor,
    tp_world: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the RMS norms of both (tokens, dim), of all ranks' parts together (MiniMax-M2)."""
    parts = zip((x1, x2), (w1, w2), sum_sq, strict=True)
    normed = (
        (x.float() * torch.rsqrt(total[:, None] / (x.shape[-1] * tp_world) + eps) * w).to(x.dtype)
        for x, w, total in parts
    )
    return next(normed), next(normed)


# --- logits and experts --------------------------------------------------------------------------


def softcap(full_logits: torch.Tensor, final_logit_softcapping: float) -> torch.Tensor:
    """Bounds logits (tokens, vocabulary) smoothly, in place (Gemma 2)."""
    return full_logits.div_(final_logit_softcapping).tanh_().mul_(final_logit_softcapping)


def shared_expert(
    hidden_states: torch.Tensor, gate_weight: torch.Tensor, shared_output: torch.Tensor
) -> torch.Tensor:
    """Returns a shared expert's output (tokens, hidden), times the sigmoid of its gate."""
    return torch.sigmoid(hidden_states @ gate_weight)[:, None] * shared_output


def add_shared_expert(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Adds the gated output of a shared expert to that of the routed ones (Qwen2-MoE)."""
    final_hidden_states.add_(shared_expert(hidden_states, gate_weight, shared_output))


_choose_experts = topk.fused_topk_native
_mix_experts = fused_moe_native.moe_forward_native


def choose_experts(*, correction_bias: torch.Tensor | None = None, **kwargs: Any) -> Any:
    """Returns the weights and numbers of each token's experts. Ernie 4.5 has its correction as a
    matrix of one row."""
    bias = None if correction_bias is None else correction_bias.flatten()
    return _choose_experts(correction_bias=bias, **kwargs)


def route(router: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns the router's logits (tokens, experts) of Gemma 4. SGLang gives the scale to a norm
    that has none on a CPU."""
    logits, _ = router.proj(router.norm(x) * router.scale * router.hidden_size**-0.5)
    return logits


def mix_experts(layer: Any, x: torch.Tensor, chosen: Any, config: Any) -> torch.Tensor:
    """Returns the sum of each token's experts (tokens, hidden). SGLang's own lacks experts without
    a gate (Nemotron-H), and those whose inputs are weighted instead of outputs (Llama 4)."""
    if config.is_gated and not config.apply_router_weight_on_input:
        return _mix_experts(layer, x, chosen, config)
    out = torch.zeros_like(x)
    for expert in chosen.topk_ids.unique().tolist():
        rows, places = torch.where(chosen.topk_ids == expert)
        weight = chosen.topk_weights[rows, places, None].to(x.dtype)
        up = functional.linear(x[rows], layer.w13_weight[expert])
        if config.apply_router_weight_on_input:
            up = weight * up
            weight = torch.ones_like(weight)
        if config.is_gated:
            gate, up = up.chunk(2, dim=-1)
            up = functional.silu(gate) * up
        else:
            up = functional.relu(up).square()
        out.index_add_(0, rows, weight * functional.linear(up, layer.w2_weight[expert]))
    return out


# --- short convolutions ------------------------------------------------------------------------


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    *_: Any,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = "silu",
    **__: Any,
) -> torch.Tensor:
    """Returns the causal convolution of sequences (channels, all tokens), one after another, and
    stores the last inputs of each in `conv_states` (slots, channels, width - 1)."""
    out = torch.empty_like(x)
    for row, (start, end) in enumerate(sequences(query_start_loc)):
        state = conv_states[cache_indices[row]]
        before = state if bool(has_initial_state[row]) else torch.zeros_like(state)
        inputs = torch.cat([before.to(x.dtype), x[:, start:end]], dim=1)
        out[:, start:end] = _convolved(inputs, weight, bias, activation)
        state.copy_(inputs[:, -state.shape[1] :])
    return out


def convolve_next(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    *_: Any,
    conv_state_indices: torch.Tensor,
    **__: Any,
) -> torch.Tensor:
    """Returns the convolution at the next token of each sequence (sequences, channels)."""
    slots = conv_state_indices.long()
    inputs = torch.cat([conv_state[slots].to(x.dtype), x[:, :, None]], dim=2)
    conv_state[slots] = inputs[:, :, 1:].to(conv_state.dtype)
    out = (inputs * weight).sum(-1)
    return _activated(out if bias is None else out + bias, activation)


def _convolved(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Any
) -> torch.Tensor:
    out = functional.conv1d(inputs[None], weight[:, None], bias, groups=len(weight))[0]
    return _activated(out, activation)


def _activated(out: torch.Tensor, activation: Any) -> torch.Tensor:
    return functional.silu(out) if activation else out


# --- gated delta rule (Qwen3-Next, Qwen3.5) ------------------------------------------------------

Split = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def split_groups(  # noqa: PLR0917 (SGLang's signature)
    qkvz: torch.Tensor, ba: torch.Tensor, groups: int, heads: int, key_dim: int, value_dim: int
) -> Split:
    """Returns q, k and v (tokens, channels), and z, b and a (tokens, heads, ...) of projections
    that have these next to each other in each group of heads."""
    values = heads // groups * value_dim
    q, k, v, z = qkvz.unflatten(-1, (groups, -1)).split([key_dim, key_dim, values, values], dim=-1)
    b, a = ba.unflatten(-1, (groups, -1)).chunk(2, dim=-1)
    mixed = torch.cat([each.flatten(1) for each in (q, k, v)], dim=-1)
    return mixed, z.reshape(-1, heads, value_dim), b.flatten(1), a.flatten(1)


def split(  # noqa: PLR0917 (SGLang's signature)
    qkvz: torch.Tensor, ba: torch.Tensor, groups: int, heads: int, key_dim: int, value_dim: int
) -> Split:
    """Returns the same of projections that have all heads of q next to each other, then of k."""
    z = qkvz[:, -heads * value_dim :].unflatten(-1, (heads, value_dim))
    b, a = ba.chunk(2, dim=-1)
    return qkvz[:, : -heads * value_dim].contiguous(), z.contiguous(), b, a


def gated_norm(norm: Any, x: torch.Tensor, z: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Returns the RMS norm of `x`, times the SiLU or the sigmoid of `z`."""
    normed = functional.rms_norm(x.float(), x.shape[-1:], norm.weight.float(), norm.eps)
    active = torch.sigmoid if norm.activation == "sigmoid" else functional.silu
    return (normed * active(z.float())).to(x.dtype)


def gate(x: torch.Tensor, z: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Returns `x`, times the sigmoid of `z`."""
    return x * torch.sigmoid(z).reshape(x.shape)


def extend_delta_rule(
    _: Any,
    *inputs: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **__: Any,
) -> tuple[torch.Tensor, None, None]:
    """Returns the outputs of `delta_rule` as the first item."""
    out = delta_rule(
        *inputs, states=ssm_states, slots=cache_indices, query_start_loc=query_start_loc
    )
    return out, None, None


def delta_rule_next(
    _: Any,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    num_v_heads: int,
    head_v_dim: int,
    **__: Any,
) -> torch.Tensor:
    """Returns the output at the next token of each sequence: (1, sequences, heads, dim)."""
    slots = cache_indices.long()
    states = ssm_states[slots]
    key_dim = states.shape[-1]
    rest = mixed_qkv.shape[-1] - num_v_heads * head_v_dim
    q, k, v = mixed_qkv.split([rest // 2, rest // 2, num_v_heads * head_v_dim], dim=-1)
    heads = (q.unflatten(-1, (-1, key_dim)), k.unflatten(-1, (-1, key_dim)))
    [decay], [beta] = gates(A_log, a, b, dt_bias)
    value = v.unflatten(-1, (num_v_heads, head_v_dim))
    out = delta_step(states, *heads, value, decay, beta, scale)
    ssm_states[slots] = states
    return out[None]


# --- Mamba 2 -------------------------------------------------------------------------------------


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *_: Any,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_states: torch.Tensor | None,
    out: torch.Tensor,
    state_dtype: torch.dtype,
    **__: Any,
) -> tuple[None, torch.Tensor, None]:
    """Writes the outputs of sequences, one after another, to `out` (1, tokens, heads, dim). Returns
    the last state of each, as second item."""
    last = []
    for row, (start, end) in enumerate(sequences(cu_seqlens)):
        shape = (1, x.shape[2], x.shape[3], B.shape[3])
        state = torch.zeros(shape) if initial_states is None else initial_states[row : row + 1]
        state = state.float().clone()
        for token in range(start, end):
            at = slice(token, token + 1)
            step = (x[0, at], dt[0, at], A, B[0, at], C[0, at], D, dt_bias)
            out[0, at] = _scan_step(state, *step).to(out.dtype)
        last.append(state.to(state_dtype))
    return None, torch.cat(last), None


def scan_next(  # noqa: PLR0917 (SGLang's signature)
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    *_: Any,
    dt_bias: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **__: Any,
) -> None:
    """Writes the output at the next token of each sequence to `out` (sequences, heads, dim)."""
    slots = state_batch_indices.long()
    states = state[slots].float()
    step = (x, dt[..., 0], A[:, 0, 0], B, C, D[:, 0], dt_bias[:, 0])
    out.copy_(_scan_step(states, *step))
    state[slots] = states.to(state.dtype)


def _scan_step(  # noqa: PLR0917
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
) -> torch.Tensor:
    """Returns the output (sequences, heads, dim), and updates the states (sequences, heads, dim,
    state dim) in place."""
    repeats = x.shape[1] // B.shape[1]
    B, C = (each.float().repeat_interleave(repeats, dim=1) for each in (B, C))
    dt = functional.softplus(dt.float() + dt_bias.float())
    states *= (dt * A.float()).exp()[..., None, None]
    states += (dt[..., None] * x.float())[..., None] * B[:, :, None]
    return (states * C[:, :, None]).sum(-1) + D.float()[:, None] * x.float()
