"""Copies of a model share its requests, against a real server."""

from __future__ import annotations

import asyncio

from prism.queueing import RequestQueue
from tests.queueing.requests import request
from tests.queueing.test_requests import DEVICE, OTHER, TTL_S, entries, waiting


async def test_of_several_copies_the_one_with_least_to_do_gets_a_request(
    queue: RequestQueue,
) -> None:
    """Running requests count, until they end or wait elsewhere."""
    await queue.route("b", OTHER)
    await queue.enqueue(request("other", "b"))
    await queue.route("a", DEVICE, OTHER)
    assert await queue.placement() == {"a": (DEVICE, OTHER), "b": (OTHER,)}
    assert [await queue.enqueue(request(str(n))) for n in range(4)] == [DEVICE, OTHER] * 2
    epoch = await queue.acquire(DEVICE, "agent", TTL_S)
    await queue.admit(DEVICE, epoch, await entries(queue, DEVICE))
    assert await queue.enqueue(request("4")) == DEVICE
    await queue.finish(DEVICE, epoch, ["0", "2", "2"])
    assert [await queue.enqueue(request(n)) for n in "567"] == [DEVICE, DEVICE, OTHER]
    assert await queue.forget(["1", "3"]) == {"1", "3"}
    assert await queue.enqueue(request("7", attempt=2)) == OTHER


async def test_a_copy_that_joins_shares_what_waits_and_one_that_leaves_gives_it_up(
    queue: RequestQueue,
) -> None:
    await queue.route("a", DEVICE)
    for n in range(600):
        await queue.enqueue(request(str(n)))
    assert await queue.route("a", DEVICE, OTHER) == 300
    assert await queue.route("a", DEVICE, OTHER) == 0
    assert (await queue.depth(DEVICE), await queue.depth(OTHER)) == (300, 300)
    assert await queue.route("a", OTHER) == 300
    assert (await queue.depth(DEVICE), await queue.depth(OTHER)) == (0, 600)
    assert await queue.route("a") == 600


async def test_a_copy_that_joins_gets_every_other_one_and_the_first_one_is_told(
    queue: RequestQueue,
) -> None:
    """Each is as late as the other then; and nothing is admitted in vain."""
    await queue.route("a", DEVICE)
    for n in range(4):
        await queue.enqueue(request(str(n)))
    epoch = await queue.acquire(DEVICE, "agent", TTL_S)
    await queue.admit(DEVICE, epoch, (await entries(queue, DEVICE))[:2])
    for n in range(4, 8):
        await queue.enqueue(request(str(n)))
    _, quiet = await queue.follow(DEVICE, "0", "0", 0)
    await queue.route("a", DEVICE, OTHER)
    assert await waiting(queue, OTHER) == ["2", "3", "5", "7"]
    assert await waiting(queue, DEVICE) == ["4", "6"]
    cursor = (await entries(queue, DEVICE))[-1]
    none, told = await queue.follow(DEVICE, cursor, quiet, 5)
    assert (none, await queue.follow(DEVICE, cursor, told, 0)) == ([], ([], told))
    assert told != quiet


async def test_whoever_joins_third_shares_by_age_not_by_device(queue: RequestQueue) -> None:
    await queue.route("a", DEVICE, OTHER)
    for n in range(6):
        await queue.enqueue(request(str(n)))
        await asyncio.sleep(0.002)  # what comes to two devices in one ms is of one age
    await queue.route("a", DEVICE, OTHER, "host:2")
    shares = [await waiting(queue, device) for device in (DEVICE, OTHER, "host:2")]
    assert shares == [["0", "3"], ["1", "4"], ["2", "5"]]
