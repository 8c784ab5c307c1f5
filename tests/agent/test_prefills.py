"""Models that only prefill (`ActivateModel.prefills`): requests leave after their first token."""

from __future__ import annotations

import pytest

from prism.messages.agent import ActivateModel
from prism.messages.requests import Request
from tests.agent.harness import DEVICE, World

pytestmark = pytest.mark.slow


async def test_requests_leave_one_by_one_with_their_kv(agent_world: World) -> None:
    """Lets them wait in the unplaced queue, until the model may decode. Their tokens are right."""
    this = agent_world
    this.start_agent()
    await this.scheduler.ready()
    model = this.config.model("a")
    assert (await this.scheduler.ask(ActivateModel(0, model, prefills=True))).ok
    await this.queue.route("a", DEVICE)
    requests = await this.frontend.send(5, "a", prompt_tokens=40, max_tokens=60)
    found: list[Request] = []
    running: set[int] = set()
    assert this.agent is not None
    while len(found) < len(requests):
        running.add(len(this.agent._state.requests.running_ids()))
        part = await this.queue.read_unplaced("0", [DEVICE])
        found = [request for _, request in part.requests if request.resume is not None]
    assert max(running) == 1
    for request in found:
        assert request.resume is not None
        assert request.resume.kv_path
        assert request.resume.kv_tokens == request.known_tokens - 1
        assert request.resumed_tokens == 1
    short = await this.frontend.send(1, "a", max_tokens=1)
    assert (await this.scheduler.evict("a")).ok
    assert (await this.scheduler.activate("a")).ok
    await this.queue.stop_holding()
    await this.queue.route("a", DEVICE)
    await this.frontend.finish([*requests, *short])
