"""Prompts that begin alike: what the queues and the simulator reckon with where they choose a
copy (decision 046)."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from prism.messages.requests import Request

BEGINNING_TOKENS = 1024
"""By which prompts are told apart: more than the instructions that many begin with. What a cache
saves of shorter prompts is worth no wait."""
REMEMBERED_S = 600.0
"""For so long after a prompt its copy is expected to have the beginning."""
SLACK_REQUESTS = 2
"""So many more than the copy with the fewest may that one have, to be taken all the same."""


def beginning(request: Request) -> str:
    """Equal for prompts that an engine computes alike as far as BEGINNING_TOKENS; empty for shorter
    ones."""
    if len(request.prompt_ids) < BEGINNING_TOKENS:
        return ""
    told = msgspec.msgpack.encode((request.lora, request.prompt_ids[:BEGINNING_TOKENS]))
    return blake2b(told, digest_size=16).hexdigest()
