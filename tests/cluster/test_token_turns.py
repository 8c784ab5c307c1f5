"""Token-level switching in a cluster of scripted agents: host:0 prefills, host:1 decodes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from lab.parity.checks import check_plans, check_turns
from lab.parity.journals import Dated
from prism.policies import registry
from prism.queueing import UNPLACED
from prism.scheduler.decision_journal import (
    CLUSTER,
    INPUTS,
    DecodeChosen,
    JournalConfig,
    PrefillChosen,
    RoundChosen,
    journal_path,
    read,
)
from tests.cluster.conftest import Cluster, spec
from tests.cluster.scripted import eventually

pytestmark = pytest.mark.slow

SCHEDULER = {"search_interval_s": None}
NO_JOURNAL = JournalConfig()
PREFILLS, DECODES = "host:0", "host:1"


async def start(
    cluster: Cluster,
    names: str,
    room: float,
    engines: int = 1,
    journal: JournalConfig = NO_JOURNAL,
) -> None:
    """Starts a cluster whose devices have room for `room` models each."""
    models = [spec(name) for name in names]
    config = cluster.configure(
        *models, rooms=(room, room), engines=engines, policy="aegaeon", scheduler=SCHEDULER
    )
    cluster.config = msgspec.structs.replace(config, journal=journal)
    (Path(config.run_dir) / "logs").mkdir(exist_ok=True)
    await cluster.start()


def turns(cluster: Cluster, device: str) -> list[str]:
    """Returns the models of the device's activations, in order."""
    return [name for order, name in cluster.agents[device].orders if order == "activate"]


async def test_prompts_prefill_on_one_device_and_decode_on_the_other(cluster: Cluster) -> None:
    await start(cluster, "ab", room=1.0)
    assert cluster.active() == {PREFILLS: set(), DECODES: set()}
    assert await cluster.send("a", max_tokens=8) == UNPLACED
    await eventually(lambda: cluster.finished("a") == 1)
    assert cluster.agents[DECODES].finished["a"] == 1
    await cluster.send("b")
    await eventually(lambda: cluster.finished("b") == 1)
    assert cluster.agents[PREFILLS].finished["b"] == 1
    assert turns(cluster, DECODES) == ["a"]


async def test_models_take_turns_until_their_requests_end(cluster: Cluster) -> None:
    """Moves the requests to host memory at the end of each turn. None ends meanwhile. Each choice
    is the policy's."""
    await start(cluster, "abc", room=1.0, journal=JournalConfig(INPUTS))
    decoding = cluster.agents[DECODES]
    decoding.decodes = False
    for name in "abc":
        await cluster.send(name, max_tokens=1000)
    await eventually(lambda: len(turns(cluster, DECODES)) >= 7, 60)
    first, rounds = turns(cluster, DECODES)[:3], turns(cluster, DECODES)[:6]
    assert set(first) == set("abc")
    assert rounds == first * 2
    assert sum(decoding.finished.values()) == 0
    decoding.decodes = True
    await eventually(lambda: all(cluster.finished(name) == 1 for name in "abc"), 60)
    path = journal_path(Path(cluster.config.run_dir) / "logs", CLUSTER)
    records = tuple(Dated(0.0, 0.0, record) for record in read(path))
    for check in (check_plans, check_turns):
        found = check(records, registry.get("aegaeon"))
        assert found.equal == found.decisions > 0, found
    kinds = {type(dated.record) for dated in records}
    assert kinds > {PrefillChosen, DecodeChosen, RoundChosen}


async def test_the_next_model_is_loaded_during_a_turn(cluster: Cluster) -> None:
    await start(cluster, "ab", room=5.0, engines=2)
    decoding = cluster.agents[DECODES]
    decoding.decodes = False
    for name in "ab":
        await cluster.send(name, max_tokens=1000)
    await eventually(lambda: decoding.active() == {"a", "b"} and len(decoding.decoding) == 1)
    decoding.decodes = True
    await eventually(lambda: all(cluster.finished(name) == 1 for name in "ab"))


async def test_a_new_scheduler_has_all_that_waits(cluster: Cluster) -> None:
    await start(cluster, "ab", room=1.0)
    decoding = cluster.agents[DECODES]
    decoding.decodes = False
    for number in range(20):
        await cluster.send("ab"[number % 2], max_tokens=8)
    await eventually(lambda: decoding.decoding)
    await cluster.stop_scheduler()
    decoding.decodes = True
    cluster.start_scheduler()
    await eventually(lambda: (cluster.finished("a"), cluster.finished("b")) == (10, 10), 60)


async def test_a_model_that_cannot_be_loaded_delays_no_other(cluster: Cluster) -> None:
    await start(cluster, "ab", room=1.0)
    for agent in cluster.agents.values():
        agent.failing["a"] = "its file is damaged"
    await cluster.send("a", max_tokens=8)
    await cluster.send("b", max_tokens=8)
    await eventually(lambda: cluster.finished("b") == 1)
    assert await cluster.refusal("a")
    for agent in cluster.agents.values():
        agent.failing.clear()
    await eventually(lambda: cluster.finished("a") == 1)


async def test_one_device_is_too_few(cluster: Cluster) -> None:
    cluster.configure(spec("a"), rooms=(2.0,), policy="aegaeon", scheduler=SCHEDULER)
    await cluster.start()
    await cluster.send("a")
    assert await cluster.refusal("a") == "no two groups of 1 devices of one node are left"


async def test_the_devices_that_are_left_share_the_roles(cluster: Cluster) -> None:
    """Drains the prefilling one of three devices: a decoding one has to prefill then."""
    cluster.configure(
        spec("a"), spec("b"), rooms=(1.0,) * 3, engines=1, policy="aegaeon", scheduler=SCHEDULER
    )
    await cluster.start()
    for name in "ab":
        await cluster.send(name, max_tokens=8)
    await eventually(lambda: cluster.finished("a") + cluster.finished("b") == 2)
    assert (await cluster.command("drain", device=PREFILLS)).ok
    await eventually(lambda: not cluster.active()[PREFILLS])
    for name in "ab":
        await cluster.send(name, max_tokens=8)
    await eventually(lambda: cluster.finished("a") + cluster.finished("b") == 4)


async def test_a_turn_lasts_until_a_request_has_had_a_token(cluster: Cluster) -> None:
    """Holds the requests of the first model for longer than its turn of 4 s. With an SLO of ten
    minutes for a token, later turns have microseconds."""
    models = [spec(name, slo_tpot_s=600.0) for name in "ab"]
    cluster.configure(*models, rooms=(1.0, 1.0), engines=1, policy="aegaeon", scheduler=SCHEDULER)
    await cluster.start()
    decoding = cluster.agents[DECODES]
    decoding.decodes = decoding.serving = False
    for name in "ab":
        await cluster.send(name, max_tokens=1000)
    await eventually(lambda: turns(cluster, DECODES))
    await asyncio.sleep(6.0)
    assert len(turns(cluster, DECODES)) == 1
    decoding.serving = True
    await eventually(lambda: len(turns(cluster, DECODES)) > 4)
