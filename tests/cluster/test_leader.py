"""Schedulers of several nodes: one leads, and another one takes over after its death."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from prism.cluster import leader as module
from prism.cluster.leader import SCHEDULER, run_as_leader
from prism.cluster.main import wait_until_eligible
from prism.config.resolved import ConfigFile, write_resolved
from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.endpoints import NodeConfig
from prism.queueing.request_queue import RequestQueue
from prism.queueing.server import BundledRedis

SOON_S = 20.0


class Candidate:
    """A scheduler that does nothing but lead."""

    def __init__(self, url: str, namespace: str, node: str) -> None:
        self.leads, self.stop = asyncio.Event(), asyncio.Event()
        config = ClusterConfig(namespace, "", url, "prism", devices=[], models=[], node=node)
        self.task = asyncio.create_task(run_as_leader(config, self.stop, self._run))

    async def _run(self, over: asyncio.Event) -> None:
        self.leads.set()
        try:
            await over.wait()
        finally:
            self.leads.clear()


async def soon(condition: asyncio.Event) -> None:
    await asyncio.wait_for(condition.wait(), SOON_S)


async def test_one_leads_until_it_ends(
    redis_server: BundledRedis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_S", 1.0)
    monkeypatch.setattr(module, "_RENEW_S", 0.2)
    monkeypatch.setattr(module, "_LOOK_S", 0.1)
    first = Candidate(redis_server.url, namespace, "a")
    await soon(first.leads)
    second = Candidate(redis_server.url, namespace, "b")
    await asyncio.sleep(1.5)  # longer than a lease
    assert first.leads.is_set()
    assert not second.leads.is_set()
    first.stop.set()
    await soon(second.leads)
    assert not first.leads.is_set()
    await first.task

    third = Candidate(redis_server.url, namespace, "c")
    second.task.cancel()  # killed: its lease runs out
    await soon(third.leads)

    # Another process has taken it, as after a suspension of this one.
    queue = RequestQueue.connect(redis_server.url, namespace)
    await queue._redis.delete(f"{namespace}:lease:{SCHEDULER}")
    epoch = await queue.acquire(SCHEDULER, "other", 60)
    async with asyncio.timeout(SOON_S):
        while third.leads.is_set():
            await asyncio.sleep(0.05)
    await queue.release(SCHEDULER, "other", epoch)
    await soon(third.leads)
    third.stop.set()
    await third.task
    await queue.close()
    await asyncio.gather(second.task, return_exceptions=True)


async def test_one_that_cannot_renew_gives_up_before_another_begins(
    short_dir: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_S", 1.0)
    monkeypatch.setattr(module, "_RENEW_S", 0.2)
    monkeypatch.setattr(module, "_LOOK_S", 0.1)
    with BundledRedis(short_dir) as server:
        only = Candidate(server.url, namespace, "a")
        await soon(only.leads)
        server.kill()
        async with asyncio.timeout(SOON_S):
            while only.leads.is_set():
                await asyncio.sleep(0.05)
        server.start()
        await soon(only.leads)
        only.stop.set()
        await only.task


async def test_another_node_may_lead_when_one_of_the_first_is_removed(tmp_path: Path) -> None:
    nodes = [NodeConfig(name, "127.0.0.1", 7300, 1, 1) for name in "abcd"]
    config = ClusterConfig("x", "", "", "prism", devices=[], models=[], node="d", nodes=nodes)
    file, stop = ConfigFile(tmp_path / "cluster.json", config), asyncio.Event()
    waiting = asyncio.create_task(wait_until_eligible(file, stop))
    await asyncio.sleep(1.0)
    assert not waiting.done()
    newer = structs.replace(config, nodes=[nodes[0], *nodes[2:]], revision=1)
    write_resolved(newer, tmp_path / "cluster.json")
    await asyncio.wait_for(waiting, SOON_S)
    assert file.config.scheduler_endpoints[0] == file.config.scheduler_endpoint
