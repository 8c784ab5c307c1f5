"""Probabilities of the likeliest tokens, scaled to a sum of 1. Rows are requests."""

from __future__ import annotations

import torch


def top_k_renorm_prob(probs: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """Keeps the `top_k` largest of each row, and all equal to the smallest of them."""
    ranked = probs.float().sort(dim=-1, descending=True).values
    last = (_column(top_k, ranked).long().clamp(1, probs.shape[-1])) - 1
    return _renormalised(probs, ranked.gather(-1, last))


def top_p_renorm_prob(probs: torch.Tensor, top_p: torch.Tensor | float) -> torch.Tensor:
    """Keeps the smallest set of largest probabilities whose sum is at least `top_p`, and all
    that equal the smallest of them."""
    ranked = probs.float().sort(dim=-1, descending=True).values
    sum_before = ranked.cumsum(dim=-1) - ranked
    kept = (sum_before < _column(top_p, ranked)).sum(dim=-1, keepdim=True).clamp(min=1)
    return _renormalised(probs, ranked.gather(-1, kept - 1))


def _column(value: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    """Returns one value for all rows, or one for each row, as a column."""
    if isinstance(value, torch.Tensor):
        return value.to(like.device).reshape(-1, 1).expand(like.shape[0], 1)
    return torch.full((like.shape[0], 1), value, device=like.device)


def _renormalised(probs: torch.Tensor, smallest: torch.Tensor) -> torch.Tensor:
    kept = torch.where(probs.float() >= smallest, probs.float(), 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)
