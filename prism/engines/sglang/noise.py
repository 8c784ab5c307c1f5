"""Seeded sampling noise on a CPU, where SGLang's own needs a compiled kernel.

SGLang samples by the Gumbel trick from one random 32-bit number per (request, vocabulary entry),
a function of the request's seed and the token's position, so that a request's stream does not
depend on what else is in its batch.
"""

from __future__ import annotations

import torch
from sglang.srt.layers import sampler

_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: positions of one seed get unlike generators
_BITS_63 = (1 << 63) - 1
_hash_on_gpu = sampler.murmur_hash32


def install() -> None:
    """Let `random_bits` stand before SGLang's hash. Idempotent."""
    sampler.murmur_hash32 = random_bits


def random_bits(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """Numbers in [0, 2^32), shape (requests, columns): of SGLang's own hash, except on a CPU."""
    if seed.device.type != "cpu":
        return _hash_on_gpu(seed, positions, col_indices)
    return _random_bits_on_cpu(seed, positions, col_indices)


def _random_bits_on_cpu(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """int64; one generator per request."""
    generator = torch.Generator()
    rows = [
        torch.randint(1 << 32, col_indices.shape, generator=generator.manual_seed(_mixed(s, p)))
        for s, p in zip(seed.tolist(), positions.tolist(), strict=True)
    ]
    return torch.stack(rows)


def _mixed(seed: int, position: int) -> int:
    return (seed * 0x100000001B3 + position * _MIX) & _BITS_63
