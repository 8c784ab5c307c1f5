"""States of sequences on vLLM's CPU backend (Mamba 2, linear attention)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from kvcached.engines.recurrences import delta_rule, gates

_stock_delta_net = gdn_attention.cpu_gdn_attention_core


def install() -> None:
    """Replaces the kernels that lack something, before a model is built. Idempotent."""
    gdn_attention.cpu_gdn_attention_core = delta_net


def without_exports(spec: KVCacheSpec) -> KVCacheSpec:
    """Returns the spec of a layer that exports no state within a step, for which vLLM needs Triton.
    With a prefix cache, vLLM's scheduler then ends steps of a prefill where blocks end."""
    if not isinstance(spec, MambaSpec):
        return spec
    return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)


def delta_net(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """Writes the outputs of a layer with the gated delta rule (tokens, heads, dim), in plain torch.
    vLLM's own kernel computes bfloat16 only."""
    if mixed_qkv.dtype == torch.bfloat16:
        _stock_delta_net(mixed_qkv, b, a, core_attn_out, layer_name)
        return
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    step: Any = context.attn_metadata[layer.prefix]
    if step.num_actual_tokens == 0:
        return
    conv, states = layer.kv_cache
    starts = step.non_spec_query_start_loc
    count = step.num_decodes + step.num_prefills
    slots, starts = step.non_spec_state_indices_tensor[:count], starts[: count + 1]
    known = torch.ones(count, dtype=torch.bool)
    if step.has_initial_state is not None:
        known = step.has_initial_state[:count]
    states[slots[~known].long()] = 0
    tokens = slice(0, step.num_actual_tokens)
    mixed = causal_conv1d_fn_cpu(
        mixed_qkv[tokens].T,
        layer.conv1d.weight.squeeze(1),
        layer.conv1d.bias,
        conv if is_conv_state_dim_first() else conv.transpose(1, 2),
        starts,
        slots,
        known,
        layer.activation,
    ).T
    q, k, v = layer.rearrange_mixed_qkv(mixed)
    decay, beta = gates(layer.A_log, a[tokens], b[tokens], layer.dt_bias)
    of_each = {"states": states, "slots": slots, "query_start_loc": starts}
    core_attn_out[tokens] = delta_rule(q, k, v, decay, beta, **of_each)[0]
