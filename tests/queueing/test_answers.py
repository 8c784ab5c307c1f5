"""Answers under an Idempotency-Key: computed by one frontend, kept within bounds."""

from __future__ import annotations

import asyncio

from prism.messages.requests import Chunk, KeptAnswer
from prism.queueing import RequestQueue


def kept(size: int = 1) -> KeptAnswer:
    return KeptAnswer("f", "cmpl-1", 1.0, [Chunk("", 1, 0, [1 << 20] * size, "stop")])


async def test_one_frontend_computes_an_answer_and_all_find_it(queue: RequestQueue) -> None:
    await queue.beat("f0", 30)
    assert await queue.claim("k", "f0", "f", 30) is None
    assert await queue.claim("k", "f0", "f", 30) is None
    assert await queue.claim("k", "f1", "f", 30) == "f"
    for number in (1, 2):  # the first one stays
        await queue.settle("k", "f0", kept(number), 30)
    assert await queue.claim("k", "f1", "f", 30) == kept()
    assert await queue.claim("other", "f0", "f", 30) is None
    await queue.settle("other", "f0", None, 30)
    assert await queue.claim("other", "f1", "f", 30) is None


async def test_claims_end_with_the_heartbeat(queue: RequestQueue) -> None:
    await queue.beat("f0", 30)
    assert await queue.claim("k", "f0", "f", 30) is None
    await queue.beat("f0", 0.01)
    await asyncio.sleep(0.05)
    assert await queue.claim("k", "f1", "f", 30) is None


async def test_kept_answers_have_bounds(queue: RequestQueue) -> None:
    """Limits time, bytes and number of answers, and drops the oldest."""
    await queue.settle("short", "f0", kept(), 0.01)
    await asyncio.sleep(0.05)
    assert await queue._redis.keys(queue._prefix + "answer*") == []
    for number in range(18):
        await queue.settle(str(number), "f0", kept(1 << 20), 60)
    assert len(await queue._redis.keys(queue._prefix + "answer:*")) == 12  # of 5 MiB
    assert isinstance(await queue.claim("17", "f0", "f", 30), KeptAnswer)
    many = [f"old{number}|0|9999999999999" for number in range(10_000)]
    await queue._redis.lpush(queue._prefix + "answers", *many)
    await queue.settle("last", "f0", kept(), 60)
    assert await queue._redis.llen(queue._prefix + "answers") == 10_000
    assert isinstance(await queue.claim("last", "f0", "f", 30), KeptAnswer)
