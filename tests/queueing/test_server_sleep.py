"""Requests to an external server and its sleep exclude each other."""

from __future__ import annotations

import asyncio
from random import Random

from redis import Redis

from prism.messages.cluster import FrontendState
from prism.messages.external import ServerLoad
from prism.queueing import BundledRedis, RequestQueue

URL, OTHER = "http://127.0.0.1:30001", "http://b"
ME = "me"


async def looked(queue: RequestQueue, owner: str = ME) -> tuple[bool, dict[str, str], int]:
    found = await queue.sleep.look(owner, [URL])
    assert found is not None
    return found.is_lost, found.asleep, found.entered[URL]


async def test_a_server_with_requests_is_not_claimed(queue: RequestQueue) -> None:
    sleep = queue.sleep
    await queue.beat("f", 30, FrontendState(external={URL: ServerLoad(1)}))
    assert await sleep.look(ME, [URL, OTHER], takes_over=True) is not None
    assert await sleep.enter(URL, "f", 1) == await sleep.enter(URL, "f", 1) == ""
    assert await looked(queue) == (False, {}, 1)
    assert not await sleep.claim(ME, URL, "asleep")
    assert await sleep.claim(ME, OTHER, "asleep")
    await sleep.leave(URL, "f", 1)
    await sleep.leave(URL, "f", 1)
    assert await sleep.claim(ME, URL, "asleep")
    assert await sleep.enter(URL, "f", 2) == "asleep"
    assert await looked(queue) == (False, {URL: "asleep", OTHER: "asleep"}, 1)
    assert await sleep.write(ME, URL, "waking")
    assert await sleep.enter(URL, "f", 2) == "waking"
    assert await sleep.write(ME, URL, "")
    assert await sleep.enter(URL, "f", 2) == ""
    assert not await sleep.claim(ME, URL, "asleep")


async def test_requests_of_dead_frontends_do_not_count(queue: RequestQueue) -> None:
    await queue.sleep.look(ME, [URL], takes_over=True)
    await queue.beat("f|2", 30)
    await queue.sleep.enter(URL, "f|2", 1)
    await queue.sleep.enter(URL, "dead", 1)
    assert (await looked(queue))[2] == 1
    await queue.remove_frontend("f|2")
    assert (await looked(queue))[2] == 0
    assert await queue.sleep.claim(ME, URL, "asleep")


async def test_the_time_since_a_request_is_known(queue: RequestQueue) -> None:
    found = await queue.sleep.look(ME, [URL], takes_over=True)
    assert found is not None
    assert found.idle_s == {}
    await queue.sleep.enter(URL, "f", 1)
    await asyncio.sleep(0.2)
    await queue.sleep.leave(URL, "f", 1)
    await asyncio.sleep(0.1)
    found = await queue.sleep.look(ME, [URL])
    assert found is not None
    assert 0.09 < found.idle_s[URL] < 0.2


async def test_only_the_last_scheduler_writes(queue: RequestQueue) -> None:
    await queue.sleep.look("old", [], takes_over=True)
    assert await queue.sleep.claim("old", URL, "asleep")
    found = await queue.sleep.look(ME, [URL], takes_over=True)
    assert found is not None
    assert (found.is_lost, found.asleep) == (False, {URL: "asleep"})
    assert await queue.sleep.look("old", [URL]) is None
    assert not await queue.sleep.claim("old", OTHER, "asleep")
    assert not await queue.sleep.write("old", URL, "")
    assert (await looked(queue))[1] == {URL: "asleep"}


async def test_a_loss_of_data_is_noticed_before_anything_is_written(
    redis_server: BundledRedis, queue: RequestQueue, namespace: str
) -> None:
    await queue.sleep.look(ME, [], takes_over=True)
    with Redis.from_url(redis_server.url) as client:
        for lost in (None, f"{ME}|another-run"):
            client.delete(f"{namespace}:sleeper")
            if lost:
                client.set(f"{namespace}:sleeper", lost)
            assert not await queue.sleep.claim(ME, URL, "asleep")
            assert not await queue.sleep.write(ME, URL, "asleep")
            assert (await looked(queue))[0]
            assert not (await looked(queue))[0]
            assert await queue.sleep.write(ME, URL, "asleep")


async def test_requests_and_sleep_exclude_each_other(queue: RequestQueue) -> None:
    """Runs many clients and a scheduler at the same time."""
    await queue.sleep.look(ME, [URL], takes_over=True)
    for frontend in "fg":
        await queue.beat(frontend, 60)
    running, slept, clients = set[int](), 0, 20

    async def request(number: int) -> None:
        rng = Random(number)
        for _ in range(10):
            await asyncio.sleep(rng.random() * 0.02)
            while await queue.sleep.enter(URL, "fg"[number % 2], number):
                await asyncio.sleep(0.005)
            running.add(number)
            await asyncio.sleep(rng.random() * 0.002)
            running.discard(number)
            await queue.sleep.leave(URL, "fg"[number % 2], number)

    async def schedule() -> None:
        nonlocal slept
        while True:
            if await queue.sleep.claim(ME, URL, "asleep"):
                assert not running
                await asyncio.sleep(0.005)
                assert not running
                slept += 1
                await queue.sleep.write(ME, URL, "")
            await asyncio.sleep(0.001)

    scheduling = asyncio.create_task(schedule())
    await asyncio.gather(*map(request, range(clients)))
    assert not scheduling.done()
    scheduling.cancel()
    assert slept > 0
