"""Requests that wait in UNPLACED until they are bound to a device, against a real server."""

from __future__ import annotations

from msgspec import structs

from prism.messages.requests import Resume
from prism.queueing import UNPLACED, RequestQueue
from tests.queueing.requests import request
from tests.queueing.test_requests import DEVICE, OTHER, TTL_S, entries, waiting


async def held(queue: RequestQueue, *names: str) -> dict[str, str]:
    """Places "a" on DEVICE and sends requests for it, which are held. Returns their entries."""
    await queue.read_unplaced("0", [])
    await queue.route("a", DEVICE)
    for name in names:
        assert await queue.enqueue(request(name)) == UNPLACED
    read = await queue.read_unplaced("0", [DEVICE])
    return {each.id: entry for entry, each in read.requests}


async def test_held_requests_go_where_they_are_bound_in_this_order(queue: RequestQueue) -> None:
    known = await held(queue, "1", "2", "3")
    await queue.route("a", DEVICE, OTHER)  # a placement moves none of them
    assert (await queue.read_unplaced("0", [])).size == 3
    assert await queue.bind(OTHER, [known["3"], known["1"]]) == {known["3"], known["1"]}
    assert await waiting(queue, OTHER) == ["3", "1"]
    assert await queue.bind(OTHER, [known["1"]]) == set()
    read = await queue.read_unplaced("0", [DEVICE, OTHER])
    assert [each.id for _, each in read.requests] == ["2"]
    assert (read.size, read.open, read.is_last) == (1, {DEVICE: 0, OTHER: 2}, True)
    assert await queue.still_unplaced({v: k for k, v in known.items()}) == {known["2"]}


async def test_none_is_bound_to_a_device_without_its_model(queue: RequestQueue) -> None:
    """Covers an eviction that has changed the placement meanwhile."""
    known = await held(queue, "1")
    await queue.route("a")
    assert await queue.bind(DEVICE, known.values()) == set()
    assert await waiting(queue, UNPLACED) == ["1"]
    assert await queue.bind(DEVICE, known.values(), anywhere=True) == {known["1"]}


async def test_those_of_a_lost_device_are_held_again(queue: RequestQueue) -> None:
    """Sends one whose KV is on a device with a copy there."""
    known = await held(queue, "1", "2", "3")
    await queue.bind(DEVICE, known.values())
    epoch = await queue.acquire(DEVICE, "agent", TTL_S)
    await queue.admit(DEVICE, epoch, (await entries(queue, DEVICE))[:2])
    await queue.route("a", OTHER)
    assert await waiting(queue, UNPLACED) == ["3"]
    resumed = structs.replace(request("1"), resume=Resume([7], kv_device=OTHER))
    assert await queue.move(DEVICE, epoch, [resumed]) == 1
    assert await waiting(queue, OTHER) == ["1"]
    await queue.acquire(DEVICE, "agent", TTL_S)
    assert await waiting(queue, UNPLACED) == ["3", "2"]


async def test_reading_goes_on_where_it_ended(queue: RequestQueue) -> None:
    await held(queue, *map(str, range(300)))
    first = await queue.read_unplaced("0", [])
    rest = await queue.read_unplaced(first.cursor, [])
    assert (len(first.requests), first.is_last) == (256, False)
    assert (len(rest.requests), rest.is_last, rest.size) == (44, True, 300)
    assert (await queue.read_unplaced(rest.cursor, [])).cursor == rest.cursor


async def test_they_follow_the_placement_once_none_is_held(queue: RequestQueue) -> None:
    """Covers a change of the policy: the route takes along what waits."""
    await held(queue, "1")
    await queue.stop_holding()
    assert await queue.route("a", DEVICE) == 1
    assert await queue.enqueue(request("2")) == DEVICE
    assert await waiting(queue, DEVICE) == ["1", "2"]


async def test_what_is_not_a_request_is_found(queue: RequestQueue) -> None:
    await held(queue)
    fields = {"id": "x", "model": "a", "attempt": "1", "body": b"junk"}
    entry = await queue._redis.xadd(queue._key("queue", UNPLACED), fields)
    assert (await queue.read_unplaced("0", [])).malformed == [entry.decode()]
