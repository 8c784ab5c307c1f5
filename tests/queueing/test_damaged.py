"""Keys that are damaged, or that other programs wrote to, count as lost.

No call fails, and their content comes back as after any loss of data.
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import suppress
from itertools import product
from random import Random
from typing import Any

import pytest
from redis import Redis

from prism.errors import LeaseLostError, MalformedRequestError
from prism.messages.cluster import ClusterStatus, FrontendState
from prism.messages.image_tensors import Tensor
from prism.messages.requests import KeptAnswer
from prism.queueing import UNPLACED, BundledRedis, RequestQueue
from tests.junk import JUNK, junk_into
from tests.queueing.requests import request

DEVICE, OTHER = "host:0", "host:1"
# All kinds that common.lua lists, and what Python writes itself.
KEYS = (
    "queue:host:0", "queue:unplaced", "left:host:0", "running:host:0", "admitted:host:0", "open",
    "load", "placement", "begun:a|x", "lease:host:0", "epoch:host:0", "frontend:f", "frontends",
    "incarnation", "server", "acquired:host:0", "claims:f", "answer:k", "answers", "answers_bytes",
    "limit:key", "malformed", "image:d", "images", "images_bytes", "status", "writable", "held",
    "entered:http://s", "asleep", "used", "sleeper",
)  # fmt: skip
KEPT = KeptAnswer("print", "cmpl-1", 1.0, [])
STATUS = ClusterStatus(0.0, "prism", {}, [])


async def settled(call: Awaitable[Any]) -> Any:
    """Awaits a call and ignores the errors that agents expect at any time."""
    with suppress(LeaseLostError, MalformedRequestError):
        return await call


async def use(queue: RequestQueue, epoch: int) -> int:
    """Makes all calls of frontends, agents and the scheduler. Returns the agent's epoch."""
    await queue.beat("f", 30, FrontendState())
    await queue.route("a", DEVICE, OTHER)
    await queue.enqueue_all([request(f"r{number}") for number in range(4)])
    await queue.enqueue(request("lonely", "b"))
    await queue.open_attempts(["r0", "r1", "lonely"])
    try:
        await queue.renew(DEVICE, "agent", epoch, 30)
    except LeaseLostError:
        epoch = await queue.acquire(DEVICE, "agent", 30, ["r0"], epoch)
    try:
        entries = [entry for entry, _ in await queue.read(DEVICE, "0")]
    except MalformedRequestError as error:
        await queue.set_aside(DEVICE, epoch, list(error.entries))
        entries = [entry for entry, _ in await queue.read(DEVICE, "0")]
    await settled(queue.admit(DEVICE, epoch, entries[:2]))
    await settled(queue.register(DEVICE, epoch, [request("r0")]))
    await settled(queue.requeue(DEVICE, epoch, ["r1"]))
    await settled(queue.move(DEVICE, epoch, [request("r0")]))
    await settled(queue.unplace(DEVICE, epoch, entries[2:]))
    await settled(queue.finish(DEVICE, epoch, ["r0", "r1"]))
    await settled(queue.discard(DEVICE, epoch, entries))
    await queue.live_frontends(["f"])
    await queue.unplaced_counts()
    await queue.wait_unplaced("0", 0)
    await queue.placement()
    await queue.depth(DEVICE)
    await queue.frontends()
    await queue.status()
    await queue.publish_status(STATUS)
    await queue.claim("k", "f", "print", 30)
    await queue.settle("k", "f", KEPT, 30)
    assert await queue.claim("k", "g", "print", 30) in (KEPT, None)
    assert await queue.store_images({"d": {"pixel_values": Tensor("uint8", (1,), b"1")}})
    await queue.keep_images(["d"])
    await queue.take_rate("key", 10, 1000, 5)
    await queue.refund_rate("key", 10, 1000, 5)
    await queue.sleep.enter("http://s", "f", 1)
    await queue.sleep.look("me", ["http://s"], takes_over=True)
    await queue.sleep.write("me", "http://s", "asleep")
    await queue.sleep.leave("http://s", "f", 1)
    await queue.sleep.claim("me", "http://s", "asleep")
    await settled(queue.follow(DEVICE, "0", "0", 0))
    await queue.forget(["r0", "r1", "r2", "r3", "lonely"])
    return epoch


@pytest.mark.parametrize("junk", JUNK)
async def test_no_call_fails_for_a_damaged_key(
    redis_server: BundledRedis, queue: RequestQueue, namespace: str, junk: str
) -> None:
    rng = Random(junk)
    epoch = await use(queue, 0)
    with Redis.from_url(redis_server.url) as client:
        for key in KEYS * 2:
            junk_into(client, f"{namespace}:{key}", junk, rng)
            epoch = await use(queue, epoch)
            assert await queue.enqueue(request("new", "c")) == UNPLACED, key
            assert await queue.forget(["new"]) == {"new"}, key
            assert await queue.status() == STATUS


async def test_damage_is_a_loss_of_data_for_all(
    redis_server: BundledRedis, queue: RequestQueue, namespace: str
) -> None:
    """Starts a new incarnation. Frontends enqueue open requests; agents take their lease again."""
    before = await queue.beat("f", 30)
    epoch = await queue.acquire(DEVICE, "agent", 30)
    await queue.renew(DEVICE, "agent", epoch, 30)
    with Redis.from_url(redis_server.url) as client:
        client.set(f"{namespace}:open", "junk")
    await queue.enqueue(request("1"))
    assert await queue.beat("f", 30) != before
    with pytest.raises(LeaseLostError):
        await queue.renew(DEVICE, "agent", epoch, 30)
    assert await queue.acquire(DEVICE, "agent", 30, [], epoch) > epoch


async def test_only_the_damaged_part_goes(
    redis_server: BundledRedis, queue: RequestQueue, namespace: str
) -> None:
    await queue.enqueue_all([request("1"), request("2")])
    with Redis.from_url(redis_server.url) as client:
        client.hset(f"{namespace}:open", "1", "junk")
        client.xadd(f"{namespace}:queue:{UNPLACED}", {"junk": "junk"})
        client.set(f"{namespace}:of-somebody-else", "stays")
        await queue.enqueue(request("1"))
        assert await queue.open_attempts(["1", "2"]) == {"1": 1, "2": 1}
        assert await queue.unplaced_counts() == {"a": 3}  # the first entry of "1" as well
        assert client.get(f"{namespace}:of-somebody-else") == b"stays"


async def test_a_lease_that_never_ends_is_taken(
    redis_server: BundledRedis, queue: RequestQueue, namespace: str
) -> None:
    with Redis.from_url(redis_server.url) as client:
        client.set(f"{namespace}:lease:{DEVICE}", "another|5")
        client.set(f"{namespace}:epoch:{DEVICE}", "9" * 400)
    assert await queue.acquire(DEVICE, "agent", 30) < 2**53


async def test_kept_answers_of_no_known_form_hold_nobody_up(
    redis_server: BundledRedis, queue: RequestQueue, namespace: str
) -> None:
    """Ends the script, however large the answers claim to be."""
    with Redis.from_url(redis_server.url) as client:
        client.rpush(f"{namespace}:answers", *["junk"] * 10)
        client.set(f"{namespace}:answers_bytes", str(1 << 40))
    await queue.settle("k", "f", KEPT, 30)
    assert (await queue.claim("k", "f", "print", 30)) in (KEPT, None)


async def test_a_key_may_be_damaged_during_a_repair(
    queue: RequestQueue, redis_server: BundledRedis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    repair, damaged = queue._drop_damaged, iter(("load", "open", "placement"))
    with Redis.from_url(redis_server.url) as client:

        def damage(key: str) -> None:
            client.delete(f"{namespace}:{key}")
            client.rpush(f"{namespace}:{key}", "junk")

        async def repair_beside_damage() -> list[str]:
            dropped = await repair()
            if key := next(damaged, ""):
                damage(key)
            return dropped

        monkeypatch.setattr(queue, "_drop_damaged", repair_beside_damage)
        damage("queue:unplaced")
        assert await queue.enqueue(request("r")) == UNPLACED


def test_junk_falls_on_junk(redis_server: BundledRedis, namespace: str) -> None:
    """Writes every kind of junk after every other to a key that no process repairs."""
    with Redis.from_url(redis_server.url) as client:
        for seed, (first, second) in enumerate(product(JUNK, JUNK)):
            key = f"{namespace}:queue:{first}/{second}"
            for kind in (first, second, second):
                junk_into(client, key, kind, Random(seed))
