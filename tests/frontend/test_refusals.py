"""Requests for models that the scheduler refuses to place."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import openai
import pytest

from prism.frontend.dispatch.refusals import RefusalWatch
from prism.frontend.dispatch.request_log import Mailbox, OpenRequest, RequestLog
from prism.messages.agent import AgentReport, ModelReport
from prism.messages.cluster import ClusterStatus
from prism.messages.requests import Chunk, Request, Sampling
from prism.queueing.request_queue import RequestQueue
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import make_config, stack_of
from tests.frontend.scripted_agent import answering, silent
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


def status(*models: ModelReport, reason: str = "", overload: bool = False) -> ClusterStatus:
    refusals = {"m": reason} if reason else {}
    report = AgentReport("host:0", 1, 0.0, 1, 1, 0, 0, 0, 1, 0, 1, list(models))
    given_up = ["m"] if overload else []
    return ClusterStatus(0.0, "prism", {}, [report], refusals=refusals, overload=given_up)


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


async def test_an_overload_is_answered_at_once_and_new_requests_are_not_enqueued(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> None:
    """Counts each as one arrival, however often OpenAI's SDK sends it. The model is served again
    once the status has it no more."""
    config = make_config(redis_server.url, namespace, short_dir)
    why = "overload: 2.0 requests/s for 14.0 GiB are worth less"
    refused = ClusterStatus(0.0, "prism", {}, [], refusals={"base": why}, overload=["base"])
    body = {**BODY, "model": "base"}
    async with stack_of(config) as stack:
        stack.agent.script = answering([7, 8, 0])
        queue, sent = stack.state.queue, 0
        await queue.route("base")  # so that its requests wait, unplaced
        waiting = [asyncio.ensure_future(stack.client.post("/v1/completions", json=body))]
        while not await queue.unplaced_counts():
            await asyncio.sleep(0.01)
        began_s = time.monotonic()
        await queue.publish_status(refused)
        waiting += [stack.client.post("/v1/completions", json=body) for _ in range(3)]
        for number, response in enumerate(await asyncio.gather(*waiting)):
            assert response.status_code == 503, number
            assert response.headers["retry-after"]
            error = response.json()["error"]
            assert error["code"] == "model_unavailable"
            assert error["message"] == f"base cannot be placed now: {why}"
        assert time.monotonic() - began_s < config.frontend.refused_timeout_s / 2
        while await queue.unplaced_counts():
            await asyncio.sleep(0.01)
        unplaced = f"{namespace}:queue:unplaced"
        entries = (await queue._redis.xinfo_stream(unplaced))["entries-added"]
        for stream in (False, True):
            again = await stack.client.post("/v1/completions", json={**body, "stream": stream})
            assert (again.status_code, again.json()["error"]["message"][:4]) == (503, "base")
            sent += 1
        assert (await queue._redis.xinfo_stream(unplaced))["entries-added"] == entries
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
            with pytest.raises(openai.InternalServerError, match="base cannot be placed now"):
                await client.completions.create(model="base", prompt="x")  # three times
            sent += 1
        served = await stack.client.post("/v1/completions", json={**BODY, "model": "chat"})
        assert served.status_code == 200

        async def arrived(model: str) -> int:
            return sum((await queue.frontends())["f0"].arrivals.get(model, {}).values())

        while not await arrived("chat"):  # the last one
            await asyncio.sleep(0.05)
        assert (await arrived("base"), await arrived("chat")) == (4 + sent, 1)
        await queue.publish_status(ClusterStatus(0.0, "prism", {}, []))
        await stack.agent.route("base")
        while (await stack.client.post("/v1/completions", json=body)).status_code != 200:
            await asyncio.sleep(0.05)


async def test_an_overload_fails_only_what_waits(
    redis_server: BundledRedis, namespace: str
) -> None:
    """Leaves requests that run on a draining engine, and streams that wait to be resumed."""
    queue = RequestQueue.connect(redis_server.url, namespace)
    requests, mailbox = RequestLog(9), Mailbox()
    for number in range(4):
        request = Request(f"r{number}", "m", [1], Sampling(9), 0.0, 1.0, 1.0, "f")
        requests.add([OpenRequest(request, number, mailbox)])
        if number < 2:
            await queue.route("m", "host:0")
            await queue.enqueue(request)
    epoch = await queue.acquire("host:0", "agent", 30)
    entries = [entry for entry, _ in await queue.read("host:0", "0")]
    await queue.admit("host:0", epoch, entries[:1])
    requests.take_chunk(Chunk("r2", 1, 0, [7, 8]))
    mailbox.clear()
    resumed = requests.get("r2")
    assert resumed is not None
    resumed.start_next_attempt()
    await queue.enqueue(resumed.request)  # r3 is about to be enqueued
    watch = RefusalWatch(requests, queue, 10.0)
    for now_unix_s in (1.0, 100.0):
        watch.take(status(ModelReport("m", "draining"), reason="full", overload=True), now_unix_s)
        await watch.reject()
        [(number, failure)] = mailbox
        assert (number, failure.message) == (1, "m cannot be placed now: full")
    assert (await queue.open_attempts(["r0", "r1", "r2"])).keys() == {"r0", "r2"}
    watch.take(status(ModelReport("m", "active"), reason="full", overload=True), 3.0)
    assert not watch.overload
    await queue.close()
