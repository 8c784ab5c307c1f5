"""Requests whose end never reached the frontend.

Agents took it for dead while it was suspended, a socket was full, or Redis lost its data.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from prism.frontend.dispatch import lost_requests
from prism.frontend.dispatch.lost_requests import LostRequestWatch
from prism.frontend.dispatch.request_log import ChunkOutcome, Mailbox, OpenRequest, RequestLog
from prism.messages.requests import (
    FRONTEND_SILENT,
    Chunk,
    Failure,
    Request,
    Sampling,
    Started,
)
from prism.queueing.request_queue import RequestQueue
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import Stack, ids_of
from tests.frontend.scripted_agent import rest, tokens
from tests.frontend.test_completions import stream
from tests.frontend.test_faults import until

BODY: dict[str, Any] = {"model": "base", "prompt": "x", "max_tokens": 20}
HALF, WHOLE = ids_of("the lazy"), ids_of("the lazy dog")
Script = Callable[[Request], AsyncIterator[Chunk | Failure]]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_requests, "SILENT_S", 0.2)
    monkeypatch.setattr(lost_requests, "CHECK_S", 0.05)


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(c["text"] for e in events for c in e.get("choices", ()))


def lost_once(
    stack: Stack, output: list[int], end: Callable[[Request], Failure] | None = None
) -> Script:
    """Returns a script whose first run leaves the queue after `output`, with `end` or silently."""
    runs: list[str] = []

    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        runs.append(request.id)
        if len(runs) > 1:
            yield rest(request, WHOLE)
            return
        if output:
            yield tokens(request, 0, output)
            await until(lambda: all(entry.received for entry in stack.state.dispatcher.log))
        if end is not None:
            yield end(request)

    return script


def frontend_silent(request: Request) -> Failure:
    return Failure(request.id, request.attempt, FRONTEND_SILENT, "it slept", retryable=True)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_request_that_vanished_is_sent_again(stack: Stack, temperature: int) -> None:
    stack.agent.script = lost_once(stack, [])
    got = await stream(stack, "/v1/completions", **BODY, temperature=temperature)
    assert text_of(got) == "the lazy dog"
    assert [r.attempt for r in stack.agent.seen] == [1, 1]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("temperature", "attempts"), [(0, [1, 1]), (1, [1, 1, 2])])
async def test_a_stream_that_vanished_goes_on(
    stack: Stack, temperature: int, attempts: list[int]
) -> None:
    """Repeats greedy output only; sampled output resumes in another attempt."""
    stack.agent.script = lost_once(stack, HALF)
    got = await stream(stack, "/v1/completions", **BODY, temperature=temperature)
    assert text_of(got) == "the lazy dog"
    assert [r.attempt for r in stack.agent.seen] == attempts


@pytest.mark.usefixtures("impatient")
async def test_sending_again_is_bounded(stack: Stack) -> None:
    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        for item in ():
            yield item

    stack.agent.script = script
    response = await stack.client.post("/v1/completions", json=BODY)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "output_lost"
    assert len(stack.agent.seen) == 4


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("output", [[], HALF])
async def test_a_stream_that_was_stopped_in_the_frontends_sleep_goes_on(
    stack: Stack, output: list[int], temperature: int
) -> None:
    stack.agent.script = lost_once(stack, output, frontend_silent)
    got = await stream(stack, "/v1/completions", **BODY, temperature=temperature)
    assert text_of(got) == "the lazy dog"
    assert [r.attempt for r in stack.agent.seen] == [1, 2]


async def test_a_second_run_of_a_sampled_attempt_is_not_shown(stack: Stack) -> None:
    """Discards the second run even if both arrive before the client's stream reads the first."""
    other = ids_of("a quick fox")

    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        if request.attempt == 1:
            first, second = tokens(request, 0, HALF), tokens(request, 0, other, "stop")
            await stack.agent.send(request.frontend_id, first, second)
        else:
            yield rest(request, WHOLE)

    stack.agent.script = script
    got = await stream(stack, "/v1/completions", **BODY, temperature=1)
    assert text_of(got) == "the lazy dog"


def opened(number: int) -> OpenRequest:
    request = Request(f"r{number}", "m", [1], Sampling(1), time.time(), 1.0, 1.0, "f")
    return OpenRequest(request, number, Mailbox(), enqueued=True)


async def test_what_the_queue_has_is_not_lost(redis_server: BundledRedis, namespace: str) -> None:
    """Requests are not lost while they wait, run, made recent progress or are about to be sent."""
    queue = RequestQueue.connect(redis_server.url, namespace)
    log, lost = RequestLog(9), []
    entries = [opened(number) for number in range(6)]
    waiting, running, gone, fresh, unsent, ended = entries
    log.add(entries)
    epoch = await queue.acquire("host:0", "me", 60)
    await queue.route("m", "host:0")
    for entry in (running, waiting):
        await queue.enqueue(entry.request)
    [first, _] = await queue.read("host:0", "0")
    await queue.admit("host:0", epoch, [first[0]])
    now_s = time.monotonic() + 100
    fresh.progress_s = now_s
    unsent.enqueued, ended.ended = False, True
    watch = LostRequestWatch(log, queue, lost.append)
    await watch.look(now_s)
    assert lost == []  # its end may be on its way
    await watch.look(now_s)
    assert lost == [gone]
    await queue.close()


async def test_what_has_ended_is_not_lost(stack: Stack) -> None:
    """Failures after a choice's unread last chunk do not break the other choice."""
    ended = asyncio.Event()

    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        if request.id.endswith("-0"):
            failed = Failure(request.id, 1, "timeout", "too late")
            await stack.agent.send(request.frontend_id, tokens(request, 0, WHOLE, "stop"), failed)
            ended.set()
        else:
            await ended.wait()
            yield tokens(request, 0, WHOLE, "stop")

    stack.agent.script = script
    answer = await stack.client.post("/v1/completions", json={**BODY, "n": 2})
    assert [c["text"] for c in answer.json()["choices"]] == ["the lazy dog"] * 2


def begun(log: RequestLog, agent: str) -> None:
    log.take_start(Started("r0", 1, "host:0", 0.0), agent)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_of_two_agents_the_last_one_answers(temperature: float) -> None:
    """Ignores the first agent, which was cut off and lost its queue without noticing."""
    log, entry = RequestLog(9), opened(0)
    sampling = msgspec.structs.replace(entry.request.sampling, temperature=temperature)
    entry.request = msgspec.structs.replace(entry.request, sampling=sampling)
    log.add([entry])
    begun(log, "old")
    begun(log, "new")
    assert log.take_chunk(Chunk("r0", 1, 0, [7]), "new") is ChunkOutcome.NOTHING
    for late in (Chunk("r0", 1, 0, [1, 2]), Chunk("r0", 1, 1, [2], "stop")):
        assert log.take_chunk(late, "old") is ChunkOutcome.NOTHING
    assert log.take_failure(Failure("r0", 1, "x", "x"), "old") is ChunkOutcome.NOTHING
    assert entry.received == [7]
    assert not entry.ended
    log.take_chunk(Chunk("r0", 1, 1, [8], "stop"), "new")
    assert entry.received == [7, 8]
    assert entry.ended


def test_output_of_an_agent_whose_start_was_lost_goes_on_elsewhere() -> None:
    log, entry = RequestLog(9), opened(0)
    log.add([entry])
    begun(log, "old")
    assert log.take_chunk(Chunk("r0", 1, 0, [7]), "old") is ChunkOutcome.NOTHING
    assert log.take_chunk(Chunk("r0", 1, 1, [8]), "new") is ChunkOutcome.RETRY
    entry.start_next_attempt()
    assert log.take_chunk(Chunk("r0", 2, 1, [8]), "new") is ChunkOutcome.NOTHING
    assert entry.received == [7, 8]


def test_a_request_may_come_back_to_an_agent() -> None:
    """Moves the request away and back within one attempt."""
    log, entry = RequestLog(9), opened(0)
    log.add([entry])
    for index, agent in enumerate(("one", "two", "one")):
        begun(log, agent)
        assert log.take_chunk(Chunk("r0", 1, index, [index]), agent) is ChunkOutcome.NOTHING
    assert entry.received == [0, 1, 2]


def test_nothing_moves_what_has_ended() -> None:
    log, entry = RequestLog(9), opened(0)
    log.add([entry])
    log.take_chunk(Chunk("r0", 1, 0, [7], "stop"))
    assert log.unended() == []
    assert log.take_chunk(Chunk("r0", 1, 5, [7])) is ChunkOutcome.NOTHING
    assert log.take_failure(Failure("r0", 1, "x", "x", True)) is ChunkOutcome.NOTHING
    assert len(entry.mailbox) == 1


async def test_a_failure_behind_the_last_chunk_is_none(stack: Stack) -> None:
    """Ends the choice at a stop string, before its engine ends it."""

    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        if request.id.endswith("-0"):
            failed = Failure(request.id, 1, "timeout", "too late")
            await stack.agent.send(request.frontend_id, tokens(request, 0, WHOLE), failed)
        else:
            await until(lambda: bool(stack.agent.cancelled))
            yield tokens(request, 0, WHOLE, "stop")

    stack.agent.script = script
    answer = await stack.client.post("/v1/completions", json={**BODY, "n": 2, "stop": "dog"})
    assert [c["text"] for c in answer.json()["choices"]] == ["the lazy "] * 2


async def test_output_between_two_looks_is_progress(
    redis_server: BundledRedis, namespace: str
) -> None:
    queue = RequestQueue.connect(redis_server.url, namespace)
    log, lost = RequestLog(9), []
    entry = opened(0)
    log.add([entry])
    watch = LostRequestWatch(log, queue, lost.append)
    now_s = time.monotonic() + 100
    await watch.look(now_s)
    log.take_chunk(Chunk("r0", 1, 0, [7]))
    await watch.look(now_s)
    assert lost == []
    await queue.close()
