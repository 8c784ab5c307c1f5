"""Question to a child process of a frontend, which answers one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def exchange(
    process: asyncio.subprocess.Process,
    question: bytes,
    read: Callable[[asyncio.StreamReader], Awaitable[bytes]],
    limit_s: float,
) -> bytes:
    """Writes `question` to the process's stdin, and returns what `read` reads of its stdout. Raises
    TimeoutError after `limit_s`, or EOFError if the process died."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(limit_s):
            process.stdin.write(question)
            await process.stdin.drain()
            answer = await read(process.stdout)
    except TimeoutError:
        raise
    except OSError as error:
        raise EOFError from error
    if not answer:
        raise EOFError
    return answer
