"""Seeded sampling noise on a CPU, where SGLang's own would need a compiled kernel.

SGLang samples by the Gumbel trick from one random 32-bit number per (request, vocabulary entry).
The number is a function of the request's seed and the token's position, so that a request's output
does not depend on the rest of its batch.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from sglang.srt.layers import sampler

_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: positions of one seed get different generators
_BITS_63 = (1 << 63) - 1
_hash_on_gpu = sampler.murmur_hash32
_sample = sampler.top_k_top_p_min_p_sampling_from_probs_torch


def install() -> None:
    """Replaces SGLang's hash and sampling with the functions of this module. Idempotent."""
    sampler.murmur_hash32 = random_bits
    sampler.top_k_top_p_min_p_sampling_from_probs_torch = sample


@wraps(_sample)
def sample(probs: torch.Tensor, *filters: Any, **options: Any) -> Any:
    """Returns a token id for each row, int32.

    SGLang's function draws noise by a token's rank, or by its id if no request of the batch has a
    top_k, top_p or min_p, so the result of a seed would depend on the other requests. It also
    rejects min_p with seeds, since the remaining probabilities do not sum to 1; the Gumbel trick
    does not need that.
    """
    top_ks, top_ps, min_ps, _, seed, positions = filters
    if seed is None or options.get("return_filtered_probs"):
        return _sample(probs, *filters, **options)
    ordered, ids = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[-1], device=probs.device).view(1, -1)
    before = ordered.cumsum(dim=-1) - ordered
    left_out = (rank >= top_ks.view(-1, 1)) | (before > top_ps.view(-1, 1))
    left_out |= ordered < ordered[:, :1] * min_ps.view(-1, 1)
    kept = probs.masked_fill(torch.empty_like(left_out).scatter_(1, ids, left_out), 0.0)
    drawn = sampler.multinomial_with_seed(kept.to(torch.float64).log_(), seed, positions)
    return drawn.view(-1).to(torch.int32)


def random_bits(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """Returns numbers in [0, 2^32), shape (requests, columns), by SGLang's hash except on a CPU."""
    if seed.device.type != "cpu":
        return _hash_on_gpu(seed, positions, col_indices)
    return _random_bits_on_cpu(seed, positions, col_indices)


def _random_bits_on_cpu(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """Returns int64 numbers, from one generator per request."""
    generator = torch.Generator()
    rows = [
        torch.randint(1 << 32, col_indices.shape, generator=generator.manual_seed(_mixed(s, p)))
        for s, p in zip(seed.tolist(), positions.tolist(), strict=True)
    ]
    return torch.stack(rows)


def _mixed(seed: int, position: int) -> int:
    return (seed * 0x100000001B3 + position * _MIX) & _BITS_63
