"""Linear recurrences in plain torch, for a CPU, one token after another.

Engines' own kernels need Triton, or compute bfloat16 only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional


def sequences(query_start_loc: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Returns the first token of each sequence and that after its last one, by the first tokens of
    all, and the number of tokens: (sequences + 1,)."""
    bounds: Sequence[int] = query_start_loc.tolist()
    return pairwise(bounds)


# --- gated delta rule (Qwen3-Next, Qwen3.5) ------------------------------------------------------


def gates(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logarithm of the decay, and the strength of the update: (1, tokens, heads)."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    states: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> torch.Tensor:
    """Returns the outputs (1, tokens, heads, dim) of sequences, one after another, and stores the
    last state of each in `states` (slots, heads, value dim, key dim)."""
    out = torch.empty_like(v)
    for slot, (start, end) in zip(slots.tolist(), sequences(query_start_loc), strict=False):
        state = states[slot : slot + 1]
        for token in range(start, end):
            at = slice(token, token + 1)
            step = (q[0, at], k[0, at], v[0, at], g[0, at], beta[0, at])
            out[0, at] = delta_step(state, *step, q.shape[-1] ** -0.5)
    return out


def delta_step(  # noqa: PLR0917
    states: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Returns the output (sequences, heads, value dim), and updates the states in place: they
    decay, and what they give for the key is moved towards the value."""
    repeats = v.shape[1] // q.shape[1]
    q = functional.normalize(q.float(), dim=-1, eps=1e-6).repeat_interleave(repeats, dim=1) * scale
    k = functional.normalize(k.float(), dim=-1, eps=1e-6).repeat_interleave(repeats, dim=1)
    states *= decay.exp()[..., None, None]
    found = (states * k[:, :, None]).sum(-1)
    delta = (v.float() - found) * beta[..., None]
    states += delta[..., None] * k[:, :, None]
    return (states * q[:, :, None]).sum(-1).to(v.dtype)
