"""Requests for models that the scheduler refuses to place."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from prism.frontend.dispatch.refusals import RefusalWatch
from prism.frontend.dispatch.request_log import Mailbox, OpenRequest, RequestLog
from prism.messages.agent import AgentReport, ModelReport
from prism.messages.cluster import ClusterStatus
from prism.messages.requests import Chunk, Request, Sampling
from prism.queueing.request_queue import RequestQueue
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import make_config, stack_of
from tests.frontend.scripted_agent import silent
from tests.frontend.test_faults import until

BODY = {"prompt": "x", "max_tokens": 20}
WAIT_S = 0.5


async def test_a_model_without_a_place_is_answered_with_the_reason(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> None:
    """Answers after `refused_timeout_s`; another model's request is unaffected."""
    config = make_config(redis_server.url, namespace, short_dir, refused_timeout_s=WAIT_S)
    refused = ClusterStatus(0.0, "prism", {}, [], refusals={"base": "123 bytes are missing"})
    async with stack_of(config) as stack:
        await stack.state.queue.publish_status(refused)
        stack.agent.script = silent
        placed = stack.client.post("/v1/completions", json={**BODY, "model": "chat"})
        other = asyncio.ensure_future(placed)
        began_s = time.monotonic()
        response = await stack.client.post("/v1/completions", json={**BODY, "model": "base"})
        assert time.monotonic() - began_s >= WAIT_S
        assert response.status_code == 503
        assert response.headers["retry-after"]
        error = response.json()["error"]
        assert error["code"] == "model_unavailable"
        assert error["message"] == "base cannot be placed now: 123 bytes are missing"
        await until(lambda: len(stack.agent.cancelled) == 1)
        assert not other.done()
        other.cancel()


async def test_a_stream_that_is_sent_again_counts_from_then_on() -> None:
    """Restarts its wait, however much output it had."""
    requests, mailbox = RequestLog(9), Mailbox()
    request = Request("r", "m", [1], Sampling(9), 0.0, 1.0, 1.0, "f")
    entry = OpenRequest(request, 0, mailbox)
    requests.add([entry])
    watch = RefusalWatch(requests, RequestQueue.connect("redis://localhost:1", "n"), 10.0)
    requests.take_chunk(Chunk("r", 1, 0, [7, 8]))
    mailbox.popleft()
    watch.take(status(reason="full"), 1.0)
    watch.take(status(reason="full"), 100.0)
    assert not mailbox  # its engine drains
    entry.start_next_attempt()
    again_s = entry.request.arrival_unix_s
    watch.take(status(reason="full"), again_s + 9.9)
    assert not mailbox
    watch.take(status(reason="full"), again_s + 10.1)
    assert mailbox.popleft()[1].code == "model_unavailable"


def status(*models: ModelReport, reason: str = "") -> ClusterStatus:
    refusals = {"m": reason} if reason else {}
    report = AgentReport("host:0", 1, 0.0, 1, 1, 0, 0, 0, 1, 0, 1, list(models))
    return ClusterStatus(0.0, "prism", {}, [report], refusals=refusals)


async def test_only_long_refusals_count() -> None:
    """Restarts the wait if the model was active in between, not if it was only tried."""
    requests, mailbox = RequestLog(9), Mailbox()
    for number, arrival_unix_s in enumerate((0.0, 15.0)):
        request = Request(
            f"r{number}", "m", [1], Sampling(1), arrival_unix_s, 1.0, 1.0, "f", ""
        )  # fmt: skip
        requests.add([OpenRequest(request, number, mailbox)])
    queue = RequestQueue.connect("redis://localhost:1", "n")
    watch = RefusalWatch(requests, queue, 10.0)

    def broken(at_s: float, seen: ClusterStatus) -> list[int]:
        watch.take(seen, at_s)
        return [mailbox.popleft()[0] for _ in range(len(mailbox))]

    full, tried = status(reason="full"), status(ModelReport("m", "activating"))
    assert broken(1.0, full) == []
    assert broken(9.0, tried) == []
    assert broken(10.9, full) == []
    assert broken(11.0, tried) == []
    assert broken(11.1, full) == [0]
    assert broken(12.0, status(ModelReport("m", "active"))) == []
    assert broken(16.0, full) == []
    assert broken(25.9, full) == []
    assert broken(26.0, full) == [0, 1]
    await queue.close()


async def test_a_model_that_cannot_be_loaded_is_not_waited_for() -> None:
    """Waits until two reports in a row say so, and while it is tried on another device."""
    requests, mailbox = RequestLog(9), Mailbox()
    request = Request("r", "m", [1], Sampling(1), 10.0, 1.0, 1.0, "f")
    requests.add([OpenRequest(request, 0, mailbox)])
    queue = RequestQueue.connect("redis://localhost:1", "n")
    watch = RefusalWatch(requests, queue, 60.0)
    broken = ModelReport("m", "failed", error="no tensor x", broken=True)
    no_room = ModelReport("m", "failed", error="1 byte is missing")
    tried = ModelReport("m", "activating")
    looks = [broken], [tried], [broken], [broken, tried], [no_room], [no_room], [broken]
    for number, models in enumerate(looks):
        watch.take(status(*models), 12.0 + number)
        assert not mailbox, number
    watch.take(status(broken), 20.0)
    [(_, error)] = mailbox
    assert (error.code, error.message) == (
        "model_unavailable",
        "m cannot be loaded: no tensor x",
    )
    await queue.close()


async def test_a_request_has_a_broken_model_tried_again_first() -> None:
    requests, mailbox = RequestLog(9), Mailbox()
    requests.add(
        [OpenRequest(Request("r", "m", [1], Sampling(1), 10.0, 1.0, 1.0, "f"), 0, mailbox)]
    )
    queue = RequestQueue.connect("redis://localhost:1", "n")
    watch = RefusalWatch(requests, queue, 60.0)
    broken = ModelReport("m", "failed", error="no tensor x", broken=True)
    for now_unix_s in (9.0, 9.9, 10.0, 10.9):
        watch.take(status(broken), now_unix_s)
        assert not mailbox
    watch.take(status(broken), 11.0)
    assert mailbox
    await queue.close()
