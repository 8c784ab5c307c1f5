"""Rotary embeddings whose factors SGLang chooses by the batch."""

from __future__ import annotations

import torch
from sglang.srt.layers.rotary_embedding.rope_variant import Phi3LongRoPEScaledRotaryEmbedding


def fix_factors(model: torch.nn.Module, context_length: int) -> None:
    """Makes LongRoPE use the same factors for all requests: the long ones, if the served context
    exceeds the positions that the short ones are made for.

    SGLang takes the long factors for a whole step if one position of the step needs them. Then an
    answer depends on the requests next to it, and KV of a cached prefix on those before it.
    """
    for module in model.modules():
        if not isinstance(module, Phi3LongRoPEScaledRotaryEmbedding):
            continue
        short = module.original_max_position_embeddings
        if context_length > short:
            # SGLang adds `short` to positions of a step that has one above it, to index the table
            # of the long factors after that of the short ones. No position is above the last one.
            module.long_short_cos_sin_cache = module.long_cos_sin_cache
            module.original_max_position_embeddings = module.max_position_embeddings
