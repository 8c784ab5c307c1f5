"""Corrections of what vLLM computes, on a CPU or in its classes of models."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models import commandr
from vllm.model_executor.models.gemma3n import Gemma3nForCausalLM

_run_gemma3n = Gemma3nForCausalLM.forward
_rotate = RotaryEmbedding.forward_cpu
_route = CPURouter._compute_routing


def install() -> None:
    """Replaces vLLM's methods, before a model runs. Idempotent."""
    RotaryEmbedding.forward_cpu = rotate
    CPURouter._compute_routing = route
    commandr.Attention = window_attention
    Gemma3nForCausalLM.forward = run_gemma3n


def window_attention(
    *args: Any, per_layer_sliding_window: int | None = None, **kwargs: Any
) -> Attention:
    """Returns attention of Cohere 2. vLLM's window has one token more than transformers'."""
    tokens = None if per_layer_sliding_window is None else per_layer_sliding_window - 1
    return Attention(*args, per_layer_sliding_window=tokens, **kwargs)


def rotate(
    layer: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the rotated heads of Q and K, each (tokens, heads * dim) or (tokens, heads, dim).
    vLLM's kernel for CPUs takes the latter for a single head."""
    q, k = (None if x is None else x.reshape(len(x), -1) for x in (query, key))
    q, k = _rotate(layer, positions, q, k)
    return q.view_as(query), None if key is None else k.view_as(key)


def route(router: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights and numbers of each token's experts. vLLM's router for CPUs applies
    sigmoids, corrections of scores and scales to experts in groups alone, such as to one group."""
    plain = router.scoring_func == "softmax" and router.e_score_correction_bias is None
    special = router.custom_routing_function or router.scoring_func == "sqrtsoftplus"
    if not (plain or special or router.use_grouped_topk):
        router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1
    chosen: tuple[torch.Tensor, torch.Tensor] = _route(router, *args, **kwargs)
    return chosen


def run_gemma3n(
    model: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    per_layer_inputs: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Returns the hidden states of Gemma 3n. vLLM embeds tokens for each layer in the whole model
    alone, with images and audio."""
    if per_layer_inputs is None:
        sizes = (model.config.num_hidden_layers, model.config.hidden_size_per_layer_input)
        embedded = model.model.get_per_layer_input_embeddings(input_ids)
        per_layer_inputs = embedded.unflatten(-1, sizes)
    hidden: torch.Tensor = _run_gemma3n(
        model, input_ids, positions, per_layer_inputs=per_layer_inputs, **kwargs
    )
    return hidden
