"""Choice for running requests whose model moves to another machine: send KV or recompute it."""

from __future__ import annotations


def sends_kv(token_bytes: int, prefill_tokens_per_s: float, network_bytes_s: float) -> bool:
    """Returns True if sending a model's KV takes less time than recomputing it.

    `n` tokens take n * token_bytes / network_bytes_s to send and n / prefill_tokens_per_s to
    compute. `n` cancels out, so the choice is the same for all requests of a model.
    """
    return token_bytes * prefill_tokens_per_s < network_bytes_s
