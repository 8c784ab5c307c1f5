"""Latent attention (MLA) of vLLM's CPU backend over blocks at any stride."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl


def _write(
    _impl: CPUMLAImpl,
    latents: torch.Tensor,
    rope: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *_: Any,
) -> None:
    """Writes latents (tokens, rank) and K's rotary parts (tokens, 1, rope) to slots of a cache
    (blocks, block_tokens, rank + rope).

    Slots below 0 are padding. vLLM's own method requires blocks without gaps between them, which
    its decode kernel does not.
    """
    if cache.numel() == 0:
        return
    real = slots.flatten() >= 0
    places = slots.flatten()[real].to(torch.long)
    tokens = torch.cat((latents, rope.squeeze(1)), dim=-1)[real]
    block_tokens = cache.shape[1]
    cache[places // block_tokens, places % block_tokens] = tokens.to(cache.dtype)


def install() -> None:
    """Replaces the method that writes latents. Idempotent."""
    CPUMLAImpl.do_kv_cache_update = _write
