"""The server goes away, hangs, comes back with its data or without."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis import Redis

from prism.errors import LeaseLostError, QueueUnavailableError
from prism.queueing import BundledRedis, RequestQueue
from tests.queueing.requests import request

DEVICE = "host:0"


@pytest.fixture
async def server(short_dir: Path) -> AsyncIterator[BundledRedis]:
    with BundledRedis(short_dir) as server:
        yield server


@pytest.fixture
async def queue(server: BundledRedis, namespace: str) -> AsyncIterator[RequestQueue]:
    queue = RequestQueue.connect(server.url, namespace)
    yield queue
    await queue.close()


async def test_killed_server_is_a_named_error_and_its_return_heals(
    server: BundledRedis, queue: RequestQueue
) -> None:
    await queue.route("a", DEVICE)
    await queue.enqueue(request("1"))
    epoch = await queue.acquire(DEVICE, "agent", 30)
    server.kill()
    with pytest.raises(QueueUnavailableError):
        await queue.enqueue(request("2"))
    with pytest.raises(QueueUnavailableError):
        await queue.follow(DEVICE, "0", "0", 1.0)
    with pytest.raises(QueueUnavailableError):
        await queue.admit(DEVICE, epoch, ["1-1"])
    server.start()
    assert await queue.enqueue(request("2")) == DEVICE
    seen = await queue.read(DEVICE, "0")
    assert [r.id for _, r in seen] == ["1", "2"]
    assert len(await queue.admit(DEVICE, epoch, [entry for entry, _ in seen])) == 2


async def test_a_server_without_its_data_gives_new_epochs(
    server: BundledRedis, queue: RequestQueue
) -> None:
    old = await queue.acquire(DEVICE, "agent", 30)
    server.kill()
    shutil.rmtree(server.directory / "appendonlydir")
    server.start()
    with pytest.raises(LeaseLostError):
        await queue.admit(DEVICE, old, ["1-1"])
    assert await queue.acquire(DEVICE, "agent", 30) > old


async def test_a_full_server_takes_all_of_them_or_none(
    server: BundledRedis, queue: RequestQueue
) -> None:
    async def enqueue_until_full() -> None:
        for batch in range(1000):
            await queue.enqueue_all([request(f"{batch}-{n}") for n in range(100)])

    with Redis.from_url(server.url) as admin:
        admin.config_set("maxmemory", admin.info("memory")["used_memory"] + 1_000_000)
        with pytest.raises(QueueUnavailableError, match="takes no writes"):
            await enqueue_until_full()
    taken = (await queue.unplaced_counts())["a"]
    assert taken > 0
    assert taken % 100 == 0


async def test_no_server_at_all(short_dir: Path) -> None:
    queue = RequestQueue.connect(f"unix://{short_dir}/none.sock", "n")
    with pytest.raises(QueueUnavailableError, match="does not answer"):
        await queue.depth(DEVICE)
    await queue.close()


async def test_wrong_password(server: BundledRedis) -> None:
    url = server.url.replace(server.password, "wrong")
    queue = RequestQueue.connect(url, "n")
    with pytest.raises(QueueUnavailableError, match="password"):
        await queue.depth(DEVICE)
    await queue.close()


async def test_a_user_without_dangerous_commands_is_enough(
    server: BundledRedis, namespace: str
) -> None:
    """Uses the rights that managed servers grant."""
    with Redis.from_url(server.url) as admin:
        rights = {"categories": ["+@all", "-@dangerous"], "keys": ["*"], "channels": ["*"]}
        admin.acl_setuser("prism", enabled=True, passwords=["+word"], **rights)
    queue = RequestQueue.connect(
        server.url.replace(f":{server.password}@", "prism:word@"), namespace
    )
    assert await queue.beat("f0", 5.0) == await queue.beat("f0", 5.0)
    epoch = await queue.acquire(DEVICE, "agent", 30)
    await queue.renew(DEVICE, "agent", epoch, 30)
    await queue.close()
