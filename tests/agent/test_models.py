"""Orders of the scheduler: activation, eviction, trim, and their effect on requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prism.config.schema.units import parse_size
from prism.messages.agent import ActivateModel, TrimModel
from tests.agent.harness import DEVICE, World, until


async def test_eviction_lets_running_ones_finish_and_the_engine_serves_another(
    agent_world: World,
) -> None:
    await agent_world.serve("a", "b")
    scheduler = agent_world.scheduler
    running = await agent_world.frontend.send(3, "a", max_tokens=150)
    await until(lambda: all(agent_world.frontend.stream(r.id).chunks for r in running))
    full = await scheduler.activate("c")
    assert not full.ok
    assert "no engine is free (a, b)" in full.message
    await agent_world.queue.route("a")
    result = await scheduler.evict("a")
    assert result.ok, result.message
    await agent_world.frontend.finish(running)
    assert scheduler.state("a") == "absent"
    assert (await scheduler.activate("c")).ok
    await agent_world.queue.route("c", DEVICE)
    await agent_world.frontend.finish(await agent_world.frontend.send(3, "c"))


async def test_eviction_moves_the_waiting_ones(agent_world: World) -> None:
    """Returns waiting requests that the scheduler has not routed away."""
    await agent_world.serve("a")
    # Four run for long; eight more wait for their slots.
    requests = await agent_world.frontend.send(12, "a", max_tokens=400)
    await until(lambda: (m := agent_world.scheduler.model("a")) and m.waiting == 8)
    assert (await agent_world.scheduler.evict("a")).ok
    assert await agent_world.queue.unplaced_counts() == {"a": 8}
    assert (await agent_world.scheduler.activate("a")).ok
    assert await agent_world.queue.route("a", DEVICE) == 8
    await agent_world.frontend.finish(requests)


async def test_waiting_ones_routed_elsewhere_are_not_served_here(agent_world: World) -> None:
    await agent_world.serve("a")
    running = await agent_world.frontend.send(4, "a", max_tokens=300)
    await until(lambda: all(agent_world.frontend.stream(r.id).chunks for r in running))
    moved = await agent_world.frontend.send(5, "a")
    await until(lambda: (m := agent_world.scheduler.model("a")) and m.waiting == 5)
    assert await agent_world.queue.route("a", "host:1") == 5
    await agent_world.frontend.finish(running)
    await until(lambda: (m := agent_world.scheduler.model("a")) and m.waiting == 0)
    assert await agent_world.queue.depth("host:1") == 5
    assert not any(agent_world.frontend.stream(r.id).chunks for r in moved)


async def test_requests_of_a_model_that_does_not_come_are_handed_back(agent_world: World) -> None:
    await agent_world.serve()
    await agent_world.queue.route("a", DEVICE)
    await agent_world.frontend.send(3)
    await until(lambda: agent_world.scheduler.report.waiting_unplaced == 3)
    cursor, counts = await agent_world.queue.wait_unplaced("0", 5)
    while counts.get("a", 0) < 3:
        cursor, more = await agent_world.queue.wait_unplaced(cursor, 5)
        counts["a"] += more.get("a", 0)
    assert await agent_world.queue.depth(DEVICE) == 0


async def test_activation_and_eviction_are_idempotent(agent_world: World) -> None:
    await agent_world.serve("a")
    assert (await agent_world.scheduler.activate("a")).ok
    assert agent_world.scheduler.report.engines_free == 1
    assert (await agent_world.scheduler.evict("b")).ok
    assert (await agent_world.scheduler.evict("a")).ok
    assert (await agent_world.scheduler.evict("a")).ok


async def test_activation_before_the_engines_are_up_waits_for_them(agent_world: World) -> None:
    agent_world.start_agent()
    await until(lambda: agent_world.scheduler.reports)
    assert agent_world.scheduler.report.engines_starting == 2
    assert (await agent_world.scheduler.activate("a")).ok
    assert agent_world.scheduler.state("a") == "active"


async def test_failed_activation_says_why_and_frees_the_engine(
    agent_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRISM_FAKE", json.dumps({"fail_activation": ["a"]}))
    await agent_world.serve("b")
    result = await agent_world.scheduler.activate("a")
    assert not result.ok
    assert "PRISM_FAKE" in result.message
    report = agent_world.scheduler.model("a")
    assert report is not None
    assert (report.state, report.error, report.broken) == ("failed", result.message, True)
    assert agent_world.scheduler.report.engines_free == 1
    await agent_world.frontend.finish(await agent_world.frontend.send(2, "b"))


async def test_a_model_that_fails_on_a_reused_engine_gets_a_fresh_one(
    agent_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRISM_FAKE", json.dumps({"fail_reuse": ["a"]}))
    await agent_world.serve("b", "c")
    used = {agent_world.engine_pid(model) for model in ("b", "c")}
    for model in ("b", "c"):
        assert (await agent_world.scheduler.evict(model)).ok
    result = await agent_world.scheduler.activate("a")
    assert result.ok, result.message
    assert agent_world.engine_pid("a") not in used
    assert agent_world.scheduler.report.engine_restarts_total == 1
    report = agent_world.scheduler.model("a")
    assert report is not None
    assert list(report.stages_s) == [
        *("engine", "shrink", "reserve", "weights", "build", "ready", "total"),
    ]
    path = Path(agent_world.config.run_dir) / "logs" / "activations-host0.trace.json"
    assert '"model": "a"' in path.read_text()


async def test_activation_takes_back_memory_that_a_cache_holds(agent_world: World) -> None:
    """Fits `b` although `a` has filled the device with prefix cache."""
    await agent_world.serve("a")
    device = agent_world.device
    for _ in range(40):
        await agent_world.frontend.finish(
            await agent_world.frontend.send(4, prompt_tokens=400, max_tokens=4)
        )
        if device.usage().free_bytes < 1 << 20:
            break
    assert device.usage().free_bytes < 1 << 20
    result = await agent_world.scheduler.activate("b")
    assert result.ok, result.message
    await agent_world.queue.route("b", DEVICE)
    await agent_world.frontend.finish(await agent_world.frontend.send(3, "b", prompt_tokens=300))


async def test_trim_gives_the_cache_back(agent_world: World) -> None:
    await agent_world.serve("a")
    await agent_world.frontend.finish(await agent_world.frontend.send(8, prompt_tokens=300))
    await until(lambda: agent_world.scheduler.report.committed_bytes > 0)
    held = agent_world.device.usage().committed_bytes
    result = await agent_world.scheduler.ask(TrimModel(0, None))
    assert result.ok
    assert parse_size(result.message.split()[0], "trim") > 0
    assert agent_world.device.usage().committed_bytes < held
    assert not (await agent_world.scheduler.ask(TrimModel(0, "b"))).ok


async def test_a_new_limit_reaches_the_engine(agent_world: World) -> None:
    await agent_world.serve("a")
    spec = agent_world.config.model("a")
    assert (await agent_world.scheduler.ask(ActivateModel(0, spec, 4 << 20))).ok
    engine_id = agent_world.scheduler.report.models[0].engine_id
    await until(
        lambda: (
            [c.limit_bytes for c in agent_world.device.usage().clients if c.name == engine_id]
            == [4 << 20]
        )
    )
    await agent_world.frontend.finish(
        await agent_world.frontend.send(10, prompt_tokens=300, max_tokens=60)
    )


async def test_two_models_against_the_devices_limit(agent_world: World) -> None:
    """Finishes all without overcommitment, although both want more memory than there is."""
    await agent_world.serve("a", "b")
    device, peak = agent_world.device, 0
    requests = []
    for _ in range(6):
        requests += await agent_world.frontend.send(6, "a", prompt_tokens=350, max_tokens=100)
        requests += await agent_world.frontend.send(6, "b", prompt_tokens=350, max_tokens=100)

    def watch() -> bool:
        nonlocal peak
        usage = device.usage()
        peak = max(peak, device.resident_bytes() + usage.static_bytes)
        return all(agent_world.frontend.stream(r.id).ended for r in requests)

    await until(watch, 120)
    await agent_world.frontend.finish(requests)
    assert peak <= device.capacity_bytes
