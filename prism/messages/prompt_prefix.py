"""Prefixes of prompts, by which the queues and the simulator choose a copy (decision 046)."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from prism.messages.requests import Request

PREFIX_TOKENS = 1024
"""Length of the compared prefix: longer than the instructions that many prompts share. A cached
prefix of a shorter prompt saves too little to wait for."""
PREFIX_KEPT_S = 600.0
"""Time for which the copy that served a prompt is expected to have its prefix cached."""
SLACK_REQUESTS = 2
"""Number of open requests that the copy with the prefix may have beyond the least busy copy."""


def prefix_hash(request: Request) -> str:
    """Returns a hash that is equal for prompts whose first PREFIX_TOKENS tokens an engine computes
    alike. Empty for shorter prompts."""
    if len(request.prompt_ids) < PREFIX_TOKENS:
        return ""
    images = [image.digest for image in request.images if image.runs[0][0] < PREFIX_TOKENS]
    prefix = msgspec.msgpack.encode((request.lora, request.prompt_ids[:PREFIX_TOKENS], *images))
    return blake2b(prefix, digest_size=16).hexdigest()
