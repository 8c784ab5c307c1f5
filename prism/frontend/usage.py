"""Token counts in OpenAI's words."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from prism.frontend.generation import Generation, Usage


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


async def with_usage(
    events: AsyncGenerator[dict[str, Any], None],
    generation: Generation,
    head: dict[str, Any],
    wanted: bool,
) -> AsyncGenerator[dict[str, Any], None]:
    """stream_options.include_usage: a null in every event, the counts in one more at the end."""
    try:
        async for event in events:
            yield {**event, "usage": None} if wanted else event
        if wanted:
            yield {**head, "choices": [], "usage": usage_fields(generation.usage)}
    finally:
        await events.aclose()
