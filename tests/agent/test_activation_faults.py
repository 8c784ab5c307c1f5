"""Activations that are killed, that race, that lack memory, and very many of them."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import msgspec
import pytest

from prism.messages.agent import ActivateModel
from prism.messages.model_spec import ModelSpec
from tests.agent.hammering import check_answers, hammer
from tests.agent.harness import World, model_spec, until


@pytest.mark.parametrize("stage", ["shrink", "reserve", "weights", "build"])
async def test_killed_in_a_stage_it_comes_up_on_the_next_engine(
    agent_world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stage: str
) -> None:
    monkeypatch.setenv("PRISM_FAULT_STAGE", stage)
    monkeypatch.setenv("PRISM_FAULT_ONCE", str(tmp_path / "died"))
    agent_world.start_agent()
    await agent_world.scheduler.ready()
    await agent_world.queue.route("a", "host:0")
    waiting = await agent_world.frontend.send(3, "a")
    result = await agent_world.scheduler.activate("a")
    assert result.ok, result.message
    assert (tmp_path / "died").exists()
    await agent_world.frontend.finish(waiting)
    await until(lambda: agent_world.scheduler.report.engine_restarts_total == 1)
    await until(lambda: agent_world.scheduler.report.engines_free == 1)
    report = agent_world.scheduler.model("a")
    assert report is not None
    usage = agent_world.device.usage()
    assert usage.static_bytes == report.static_bytes
    assert {c.name for c in usage.clients if c.static_bytes} == {report.engine_id}


async def test_killed_in_every_try_it_fails_and_nothing_stays(
    agent_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRISM_FAULT_STAGE", "weights")
    agent_world.start_agent()
    await agent_world.scheduler.ready()
    result = await agent_world.scheduler.activate("a")
    assert not result.ok
    assert "died 4 times" in result.message
    await until(lambda: agent_world.scheduler.report.engines_free == 2)
    assert agent_world.device.usage().reserved_bytes == 0


async def test_a_model_that_does_not_fit_fails_with_the_missing_bytes(agent_world: World) -> None:
    await agent_world.serve("a")
    huge = model_spec("huge")
    device = agent_world.device
    free_bytes = device.usage().free_bytes
    order = ActivateModel(0, _with_weights(huge, free_bytes))
    result = await agent_world.scheduler.ask(order)
    assert not result.ok
    assert "more than are free" in result.message
    assert device.usage().free_bytes == free_bytes
    await agent_world.frontend.finish(await agent_world.frontend.send(2, "a"))


async def test_of_two_that_race_for_the_last_room_one_wins(agent_world: World) -> None:
    """Runs five rounds with two models that fit alone but not together."""
    agent_world.start_agent()
    await agent_world.scheduler.ready()
    device = agent_world.device
    weight_bytes = device.usage().capacity_bytes // 2
    for round_ in range(5):
        orders = [
            ActivateModel(0, _with_weights(model_spec(f"{name}{round_}"), weight_bytes))
            for name in "xy"
        ]
        results = await asyncio.gather(*(agent_world.scheduler.ask(order) for order in orders))
        assert sorted(r.ok for r in results) == [False, True], results
        loser = next(r for r in results if not r.ok)
        assert "more than are free" in loser.message
        for order in orders:
            assert (await agent_world.scheduler.evict(order.model.name)).ok
        assert device.usage().reserved_bytes == 0


async def check_usable(this: World) -> None:
    for name in "abc":
        assert (await this.scheduler.evict(name)).ok
    assert this.device.usage().reserved_bytes == 0
    for name in "ab":
        assert (await this.scheduler.activate(name)).ok
        await this.queue.route(name, "host:0")
        await this.frontend.finish(await this.frontend.send(2, name))


@pytest.mark.parametrize("orders", [150, pytest.param(1000, marks=pytest.mark.long)])
async def test_rapid_orders_are_all_answered(
    agent_world: World, monkeypatch: pytest.MonkeyPatch, orders: int
) -> None:
    monkeypatch.setenv("PRISM_FAKE", json.dumps({"activation_s": 0.005}))
    agent_world.start_agent()
    await agent_world.scheduler.ready()
    results = await hammer(agent_world, orders, random.Random(orders), 0.01)
    check_answers(agent_world, results, orders)
    await check_usable(agent_world)


def _with_weights(spec: ModelSpec, weight_bytes: int) -> ModelSpec:
    return msgspec.structs.replace(spec, weight_bytes=weight_bytes)
