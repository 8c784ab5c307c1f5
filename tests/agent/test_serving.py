"""Requests through a complete agent."""

from __future__ import annotations

from prism.scheduler.traffic import bucket
from tests.agent.harness import DEVICE, World, until


async def test_activates_and_serves_with_the_right_tokens(agent_world: World) -> None:
    await agent_world.serve("a", "b")
    first = await agent_world.frontend.send(6, "a")
    second = await agent_world.frontend.send(6, "b", prompt_tokens=90, max_tokens=40)
    await agent_world.frontend.finish([*first, *second])
    scheduler = agent_world.scheduler
    await until(lambda: (m := scheduler.model("b")) and m.finished_total == 6)
    report = scheduler.model("b")
    assert report is not None
    assert (report.prompt_tokens_total, report.output_tokens_total) == (6 * 90, 6 * 40)
    assert report.output_lengths == [(bucket(40), 6)]
    assert report.met_total == 6
    assert report.prefill_tokens_per_s > 0
    assert report.maps_total > 0
    assert (report.waiting, report.running, report.failed_total) == (0, 0, 0)
    assert 0 < scheduler.report.resident_bytes <= scheduler.report.capacity_bytes
    await until(lambda: agent_world.agent is not None)
    epoch = scheduler.report.epoch
    await agent_world.stop_agent()
    # All were acknowledged: nothing is left for the next agent.
    assert await agent_world.queue.acquire(DEVICE, "next", 5) > epoch
    assert await agent_world.queue.depth(DEVICE) == 0


async def test_requests_that_came_before_the_model_are_served(agent_world: World) -> None:
    await agent_world.queue.route("a", DEVICE)
    early = await agent_world.frontend.send(3)
    await agent_world.serve("a")
    await agent_world.frontend.finish(early)
