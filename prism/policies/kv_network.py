"""Running requests whose model goes to another machine: their KV is sent, or computed again."""

from __future__ import annotations


def sends_kv(token_bytes: int, prefill_tokens_per_s: float, network_bytes_s: float) -> bool:
    """Whether sending takes less time: `n` tokens of KV take n * token_bytes / network_bytes_s, and
    computing their prompts and outputs again takes n / prefill_tokens_per_s. Both grow with `n`
    alike, so this is one choice for all requests of a model: prefill makes so many bytes of KV per
    second, and the network carries more or fewer.
    """
    return token_bytes * prefill_tokens_per_s < network_bytes_s
