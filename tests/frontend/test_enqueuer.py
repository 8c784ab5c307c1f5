"""Concurrent requests go to Redis in one batch, and none is lost or duplicated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from prism.errors import QueueUnavailableError
from prism.frontend.dispatch import enqueuer
from prism.frontend.dispatch.enqueuer import Enqueuer
from prism.frontend.dispatch.request_log import Mailbox, OpenRequest, RequestLog
from prism.messages.requests import Request, Sampling
from prism.queueing import UNPLACED, BundledRedis, RequestQueue


class WatchedQueue(RequestQueue):
    """Queue on a real server that records the sizes of batches.

    Each batch waits for `may_go`. If `lossy`, Redis takes the batch and the answer is lost.
    """

    lossy = False

    def watch(self) -> None:
        self.sizes: list[int] = []
        self.may_go = asyncio.Event()
        self.may_go.set()

    async def enqueue_all(self, requests: Sequence[Request]) -> list[str]:
        self.sizes.append(len(requests))
        await self.may_go.wait()
        queues = await super().enqueue_all(requests)
        if self.lossy:
            raise QueueUnavailableError("the connection broke")
        return queues

    async def waiting(self) -> list[str]:
        return [request.id for _, request in await self.read(UNPLACED, "0", 1000)]


def opened(log: RequestLog, *ids: str) -> list[OpenRequest]:
    entries = [
        OpenRequest(Request(i, "m", [1], Sampling(1), time.time(), 1.0, 1.0, "f"), 0, Mailbox())
        for i in ids
    ]
    log.add(entries)
    return entries


@pytest.fixture
async def queue(redis_server: BundledRedis, namespace: str) -> AsyncIterator[WatchedQueue]:
    queue = WatchedQueue.connect(redis_server.url, namespace)
    queue.watch()
    yield queue
    await queue.close()


@pytest.fixture
def log() -> RequestLog:
    return RequestLog(10_000, 1)


async def test_what_comes_at_once_goes_together(
    queue: WatchedQueue, log: RequestLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps the order and each HTTP request's choices together; batches are bounded."""
    monkeypatch.setattr(enqueuer, "_SLOW_S", 60.0)
    entries = opened(log, *(str(number) for number in range(600)))
    into = Enqueuer(queue, log)
    await asyncio.gather(*(into.put(entries[i : i + 2]) for i in range(0, 600, 2)))
    assert queue.sizes == [256, 256, 88]
    assert await queue.waiting() == [each.request.id for each in entries]
    assert all(each.enqueued for each in entries)


async def test_what_follows_at_once_goes_with_it(queue: WatchedQueue, log: RequestLog) -> None:
    """Sockets are read one after another, but an engine's first step should have the whole
    burst."""
    into, puts = Enqueuer(queue, log), []
    for entry in opened(log, *"abcd"):
        puts.append(asyncio.create_task(into.put([entry])))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*puts)
    assert queue.sizes == [4]


async def test_those_that_follow_hold_up_nobody(queue: WatchedQueue, log: RequestLog) -> None:
    into, puts = Enqueuer(queue, log), []
    while not queue.sizes:
        [entry] = opened(log, str(len(log)))
        puts.append(asyncio.create_task(into.put([entry])))
        await asyncio.sleep(0)
    await asyncio.gather(*puts)
    assert sum(queue.sizes) == len(log)


async def test_a_put_beyond_the_bound_goes_whole(queue: WatchedQueue, log: RequestLog) -> None:
    await Enqueuer(queue, log).put(opened(log, *(str(number) for number in range(300))))
    assert queue.sizes == [300]
    assert len(await queue.waiting()) == 300


async def test_a_lost_answer_doubles_nothing(queue: WatchedQueue, log: RequestLog) -> None:
    """Raises for every put of the batch; each may be repeated."""
    entries, into = opened(log, *"abc"), Enqueuer(queue, log)
    queue.lossy = True
    puts = [into.put([each]) for each in entries]
    failed = await asyncio.gather(*puts, return_exceptions=True)
    assert [type(each) for each in failed] == [QueueUnavailableError] * 3
    assert not any(each.enqueued for each in entries)
    queue.lossy = False
    await asyncio.gather(*(into.put([each]) for each in entries))
    assert await queue.waiting() == ["a", "b", "c"]


async def test_who_goes_before_the_batch_is_not_in_it(queue: WatchedQueue, log: RequestLog) -> None:
    """Drops requests that were closed, or whose client has gone, before their batch is sent."""
    entries, into = opened(log, *"abcd"), Enqueuer(queue, log)
    queue.may_go.clear()
    puts = [asyncio.create_task(into.put(entries[:1]))]
    while not queue.sizes:
        await asyncio.sleep(0)
    puts += [asyncio.create_task(into.put([entry])) for entry in entries[1:]]
    await asyncio.sleep(0)
    assert queue.sizes == [1]
    puts[1].cancel()
    log.close("c")
    queue.may_go.set()
    await asyncio.gather(*puts, return_exceptions=True)
    assert await queue.waiting() == ["a", "d"]
    assert [each.enqueued for each in entries] == [True, False, False, True]


async def test_a_silent_call_holds_up_nobody(
    queue: WatchedQueue, log: RequestLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enqueuer, "_SLOW_S", 0.01)
    [first, second], into = opened(log, *"ab"), Enqueuer(queue, log)
    queue.may_go.clear()
    hangs = asyncio.create_task(into.put([first]))
    await asyncio.sleep(0.1)
    queue.may_go = asyncio.Event()  # of later calls
    queue.may_go.set()
    await into.put([second])
    assert await queue.waiting() == ["b"]
    hangs.cancel()


async def test_a_loop_that_stood_still_begins_no_empty_batch(
    queue: WatchedQueue, log: RequestLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that come after a long turn of the loop do not wait for _SLOW_S.

    The long turn, as for another client's large body, is between a put and its batch's first turn.
    """
    monkeypatch.setattr(enqueuer, "_SLOW_S", 0.5)
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: errors.append(what))
    [first, second], into = opened(log, *"ab"), Enqueuer(queue, log)
    put = asyncio.create_task(into.put([first]))
    await asyncio.sleep(0)
    time.sleep(0.6)  # noqa: ASYNC251
    await put
    began_s = time.monotonic()
    await into.put([second])
    took_s = time.monotonic() - began_s
    await asyncio.sleep(0)
    assert not errors
    assert not into._batches
    assert took_s < 0.4, "it waited for the timer of a batch that had nothing"
    assert queue.sizes == [1, 1]
