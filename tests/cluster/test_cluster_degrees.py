"""A model of `tp: auto` whose degree follows its load, with scripted agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from prism.cluster.actuator import Actuator
from prism.policies.data import Activate
from prism.scheduler import traffic
from tests.cluster.conftest import Cluster, spec
from tests.cluster.scripted import ScriptedAgent, eventually
from tests.cluster.test_cluster_view import make_state

pytestmark = pytest.mark.slow

AUTO = spec("a", degrees=(1, 2), num_kv_heads=2, token_bytes=256, slo_ttft_s=0.4, replicas_max=1)
# A prompt takes 50 ms on one device.
AGENT = {"prompt_tokens": 100, "prefill_tokens_per_s": 2000.0}
LOW, LOAD = 2.0, 6.0  # requests per second
HIGH = 3 * LOAD


@pytest.fixture
async def auto(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Starts a cluster of three devices, which remembers ten seconds of its traffic."""
    monkeypatch.setattr(traffic, "SLOT_S", 0.5)
    monkeypatch.setattr(traffic, "SLOTS", 20)
    cluster.configure(AUTO, rooms=(2.0, 2.0, 2.0))
    await cluster.start(**AGENT)
    return cluster


@asynccontextmanager
async def load(cluster: Cluster, rate_rps: float) -> AsyncIterator[None]:
    """Sends requests in the block. All of them are served, each once."""
    before, sent = cluster.finished("a"), 0

    async def send() -> None:
        nonlocal sent
        while True:
            await cluster.send("a")
            sent += 1
            await asyncio.sleep(1 / rate_rps)

    sending = asyncio.create_task(send())
    yield
    sending.cancel()
    await asyncio.wait([sending])
    await eventually(lambda: cluster.finished("a") >= before + sent)
    await asyncio.sleep(0.2)
    assert before + sent <= cluster.finished("a") <= before + sent + 1


def degrees(cluster: Cluster) -> list[int]:
    """Returns the degrees of the active copies."""
    found = [agent.residents.get("a") for agent in cluster.agents.values()]
    return [1 + len(each.peers) for each in found if each and each.state == "active"]


async def test_the_degree_follows_the_load(cluster: Cluster, auto: Cluster) -> None:
    """Raises it when the load triples, and lowers it when little is left."""
    async with load(cluster, LOAD):
        await asyncio.sleep(3.0)
        assert degrees(cluster) == [1]
    async with load(cluster, HIGH):
        await eventually(lambda: degrees(cluster) == [2])
    async with load(cluster, LOW):
        await eventually(lambda: degrees(cluster) == [1], 60)
    assert (await cluster.status()).actions_total["migrate"] == 2


async def test_a_scheduler_that_restarts_during_a_change(cluster: Cluster, auto: Cluster) -> None:
    """Knows the degree of each copy from the agents' reports, and leaves one copy."""

    def holders(state: str) -> list[ScriptedAgent]:
        agents = cluster.agents.values()
        return [x for x in agents if "a" in x.residents and x.residents["a"].state == state]

    for agent in cluster.agents.values():
        agent.stuck.add("a")
    async with load(cluster, HIGH):
        [second] = await eventually(lambda: holders("activating"))
        assert second.residents["a"].peers
        await cluster.stop_scheduler()
        for agent in cluster.agents.values():
            agent.stuck.clear()
        await eventually(lambda: len(holders("active")) == 2)
        cluster.start_scheduler()
        await eventually(lambda: degrees(cluster) == [2])
    [report] = [m for a in (await cluster.status()).agents for m in a.models]
    assert len(report.peers) == 1


async def test_another_degree_is_refused() -> None:
    """Lets no policy of another package end the scheduler."""
    state, unused = make_state(AUTO), cast("Any", None)
    action = Activate("a", "host:0", "why", peers=("host:1", "host:2"))
    started = Actuator(state, unused, unused).start(action)
    assert started is not None
    assert await started == "a cannot be on 3 devices; its degrees are 1, 2"
    assert state.activations.barred("a", 100.0) == ("host:0",)


async def test_an_operator_does_not_choose_one_of_two_devices(
    cluster: Cluster, auto: Cluster
) -> None:
    async with load(cluster, HIGH):
        await eventually(lambda: degrees(cluster) == [2])
    refused = await cluster.command("activate", model="a", device="host:0")
    assert refused.message == "the scheduler chooses the 2 devices of a; omit the device"
    assert (await cluster.command("evict", model="a")).ok
    assert (await cluster.command("activate", model="a")).ok
    assert degrees(cluster) == [2]  # its last traffic needs two
