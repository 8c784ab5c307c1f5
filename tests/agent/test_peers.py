"""Engines of two ranks in the pool: one on this agent's device, one on another's."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

import kvcached
from prism.config.resolved import write_resolved
from prism.messages.agent import ActionResult, ActivateModel, ModelReport
from prism.queueing import BundledRedis
from tests.agent.conftest import FAST
from tests.agent.harness import DEVICE, World, make_config, until, world

PEER = "host:1"


@asynccontextmanager
async def pair_of(
    redis_server: BundledRedis, short_dir: Path, namespace: str
) -> AsyncIterator[World]:
    """Yields a world whose model a spans this device and one without an agent."""
    config = make_config(short_dir, namespace, redis_server.url)
    [device], [a, *rest] = config.devices, config.models
    config = msgspec.structs.replace(
        config,
        devices=[device, msgspec.structs.replace(device, name=PEER)],
        models=[msgspec.structs.replace(a, tp=2), *rest],
    )
    write_resolved(config, short_dir / "cluster.json")
    async with world(config, FAST) as this:
        this.start_agent()
        await this.scheduler.ready()
        yield this


@pytest.fixture
async def pair(redis_server: BundledRedis, short_dir: Path, namespace: str) -> AsyncIterator[World]:
    async with pair_of(redis_server, short_dir, namespace) as this:
        yield this


@pytest.fixture
def peer(pair: World) -> Iterator[kvcached.Device]:
    place = pair.config.device(PEER)
    yield kvcached.Device.open(
        PEER,
        capacity_bytes=place.capacity_bytes,
        page_bytes=place.page_bytes,
        namespace=pair.config.namespace,
    )
    kvcached.Device.unlink(pair.config.namespace, PEER, force=True)


async def activate_pair(this: World) -> ActionResult:
    order = ActivateModel(0, this.config.model("a"), peers=(PEER,))
    result = await this.scheduler.ask(order)
    if result.ok:
        await this.queue.route("a", DEVICE)
    return result


def report_of(this: World, name: str) -> ModelReport:
    report = this.scheduler.model(name)
    assert report is not None
    return report


async def test_models_on_one_and_on_two_devices_take_turns(
    pair: World, peer: kvcached.Device
) -> None:
    """Switches both engines back and forth; the pool keeps its size."""
    for _ in range(2):
        assert (await activate_pair(pair)).ok
        engine, spec = report_of(pair, "a").engine_id, pair.config.model("a")
        assert report_of(pair, "a").peers == (PEER,)
        [rank] = [c for c in peer.usage().clients if c.name == f"{engine}.1"]
        share = pair.config.engine.static_bytes
        assert rank.static_bytes == report_of(pair, "a").static_bytes
        assert rank.static_bytes == spec.weight_bytes // 2 + share
        await pair.frontend.finish(await pair.frontend.send(6, "a", prompt_tokens=90))
        assert (await pair.scheduler.evict("a")).ok
        assert peer.usage().reserved_bytes == 0
        for name in "bc":
            assert (await pair.scheduler.activate(name)).ok
            await pair.queue.route(name, DEVICE)
            await pair.frontend.finish(await pair.frontend.send(2, name))
        for name in "bc":
            assert (await pair.scheduler.evict(name)).ok
    report = pair.scheduler.report
    assert (report.engines_total, report.engine_restarts_total) == (2, 0)
    assert peer.usage().clients == ()


async def test_an_idle_engine_of_two_ranks_is_used_again(
    pair: World, peer: kvcached.Device
) -> None:
    assert (await activate_pair(pair)).ok
    engine = report_of(pair, "a").engine_id
    assert (await pair.scheduler.evict("a")).ok
    assert (await activate_pair(pair)).ok
    assert report_of(pair, "a").engine_id == engine


async def test_a_killed_rank_ends_the_engine_and_the_model_comes_back_on_both(
    pair: World, peer: kvcached.Device
) -> None:
    assert (await activate_pair(pair)).ok
    before = report_of(pair, "a")
    [rank] = peer.usage().clients
    os.kill(rank.pid, signal.SIGKILL)
    await until(lambda: report_of(pair, "a").engine_id not in ("", before.engine_id))
    await until(lambda: report_of(pair, "a").state == "active")
    await pair.frontend.finish(await pair.frontend.send(2, "a"))
    [successor] = peer.usage().clients
    assert successor.name == f"{report_of(pair, 'a').engine_id}.1"


async def test_a_peer_without_room_fails_the_activation_with_what_is_missing(
    pair: World, peer: kvcached.Device
) -> None:
    with peer.client("thief") as thief:
        loot = thief.reserve_static(peer.usage().free_bytes, "loot")
        result = await activate_pair(pair)
        assert not result.ok
        assert "rank 1: " in result.message
        assert "are missing on" in result.message or "more than are free" in result.message
        assert pair.device.usage().reserved_bytes == 0
        loot.release()
    assert (await activate_pair(pair)).ok


async def test_a_full_peer_holds_requests_back_until_it_has_room(
    pair: World, peer: kvcached.Device
) -> None:
    """Needs more than the guaranteed room, while another client holds the rest of the peer."""
    assert (await activate_pair(pair)).ok
    with peer.client("thief") as thief:
        free_bytes = peer.usage().free_bytes // peer.page_bytes * peer.page_bytes
        loot = thief.alloc_virtual_tensor(free_bytes)
        loot.map(0, free_bytes)
        requests = await pair.frontend.send(4, "a", prompt_tokens=300, max_tokens=40)
        await until(lambda: report_of(pair, "a").waiting > 0)
        thief.free_virtual_tensor(loot)
        await pair.frontend.finish(requests)


@pytest.mark.parametrize("stage", ["shrink", "reserve", "weights", "build"])
async def test_one_rank_killed_in_a_stage_it_comes_up_on_both(
    monkeypatch: pytest.MonkeyPatch,
    redis_server: BundledRedis,
    short_dir: Path,
    namespace: str,
    stage: str,
) -> None:
    """Kills the first rank to get there; the other ends with it, and nothing of either remains."""
    once = short_dir / "died"
    monkeypatch.setenv("PRISM_FAULT_STAGE", stage)
    monkeypatch.setenv("PRISM_FAULT_ONCE", str(once))
    async with pair_of(redis_server, short_dir, namespace) as this:
        result = await activate_pair(this)
        assert result.ok, result.message
        assert once.exists()
        engine = report_of(this, "a").engine_id
        holders = [
            [c.name for c in device.usage().clients if c.reserved_bytes]
            for device in (this.device, kvcached.Device.open(PEER, namespace=namespace))
        ]
        assert holders == [[engine], [f"{engine}.1"]]
        await this.frontend.finish(await this.frontend.send(2, "a"))
    kvcached.Device.unlink(namespace, PEER, force=True)
