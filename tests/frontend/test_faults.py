"""Engines that die, clients that disconnect, and shutdown."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Literal

import httpx
import msgspec
import pytest

from prism.frontend.__main__ import drain, serve
from prism.frontend.app import create_app
from prism.frontend.dispatch.request_log import ATTEMPTS_MAX
from prism.messages.requests import Chunk, Failure, Request
from prism.queueing.request_queue import RequestQueue
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import Stack, ids_of, make_config, stack_of
from tests.frontend.scripted_agent import answering, died, rest, silent, tokens
from tests.frontend.test_completions import events, stream

BODY = {"model": "base", "prompt": "x", "max_tokens": 20}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


WHOLE = [*ids_of("the lazy dog"), 0]


def failing(
    failures: int, cut: int, blame: Literal["", "suspect"] = ""
) -> Callable[[Request], AsyncIterator[Chunk | Failure]]:
    """Returns a script whose first `failures` attempts die after `cut` more tokens of WHOLE each.

    The next attempt sends the rest.
    """

    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        last = rest(request, WHOLE)
        if request.attempt > failures:
            yield last
            return
        if cut:
            yield tokens(request, last.first_index, last.token_ids[:cut])
        yield msgspec.structs.replace(died(request), blame=blame)
        yield tokens(request, last.first_index + cut, ids_of("late"), "stop")

    return script


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("cut", [0, 1, 5])
async def test_a_stream_goes_on_behind_what_came(stack: Stack, cut: int, temperature: int) -> None:
    """Resumes whether or not the client has read the output; no token is computed or shown
    twice."""
    stack.agent.script = failing(2, cut)
    got = await stream(stack, "/v1/completions", **BODY, temperature=temperature)
    assert "".join(e["choices"][0]["text"] for e in got) == "the lazy dog"
    assert [r.attempt for r in stack.agent.seen] == [1, 2, 3]
    resumes = [r.resume.output_ids if r.resume else [] for r in stack.agent.seen]
    assert resumes == [WHOLE[: cut * i] for i in range(3)]


async def test_an_answer_goes_on_behind_what_came(stack: Stack) -> None:
    stack.agent.script = failing(2, 4)
    answer = (await stack.client.post("/v1/completions", json=BODY)).json()
    assert answer["choices"][0]["text"] == "the lazy dog"
    assert answer["usage"]["completion_tokens"] == len(WHOLE)


async def test_text_held_back_for_a_stop_string_is_kept(stack: Stack) -> None:
    stack.agent.script = failing(1, len(ids_of("the la")))
    got = await stream(stack, "/v1/completions", **BODY, stop="lazy cat")
    assert "".join(e["choices"][0]["text"] for e in got) == "the lazy dog"


async def test_the_next_token_of_one_that_goes_on_is_due_within_its_tpot_slo(stack: Stack) -> None:
    stack.agent.script = failing(1, 3)
    await stream(stack, "/v1/completions", **BODY)
    first, second = stack.agent.seen
    assert second.arrival_unix_s >= first.arrival_unix_s
    assert second.deadline_unix_s == second.arrival_unix_s + first.slo_tpot_s
    rest_s = first.slo_tpot_s * (len(WHOLE) - 3)
    assert second.e2e_deadline_unix_s(len(WHOLE)) == pytest.approx(second.arrival_unix_s + rest_s)
    whole_s = first.slo_ttft_s + first.slo_tpot_s * (len(WHOLE) - 1)
    assert first.e2e_deadline_unix_s(len(WHOLE)) == pytest.approx(first.arrival_unix_s + whole_s)


async def test_a_request_outlives_many_agents_but_not_any_number(stack: Stack) -> None:
    stack.agent.script = failing(ATTEMPTS_MAX - 1, 0)
    answer = (await stack.client.post("/v1/completions", json=BODY)).json()
    assert answer["choices"][0]["text"] == "the lazy dog"
    stack.agent.script = failing(100, 0)
    response = await stack.client.post("/v1/completions", json=BODY)
    assert response.json()["error"]["code"] == "engine_died"
    assert len(stack.agent.seen) == 2 * ATTEMPTS_MAX


async def test_attempts_that_may_have_killed_their_engine_are_few(stack: Stack) -> None:
    stack.agent.script = failing(100, 0, "suspect")
    response = await stack.client.post("/v1/completions", json=BODY)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_died"
    assert [r.attempt for r in stack.agent.seen] == [1, 2, 3]


async def test_a_stream_without_attempts_left_ends_with_the_named_error(stack: Stack) -> None:
    stack.agent.script = failing(100, 1, "suspect")
    got = await stream(stack, "/v1/completions", **BODY)
    assert got[-1]["error"]["code"] == "engine_died"
    assert [r.attempt for r in stack.agent.seen] == [1, 2, 3]


async def test_a_failure_that_is_not_retryable_keeps_its_code(stack: Stack) -> None:
    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        yield Failure(request.id, 1, "context_length_exceeded", "too long for the engine")

    stack.agent.script = script
    response = await stack.client.post("/v1/completions", json=BODY)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "too long for the engine"


async def test_a_second_run_of_the_same_attempt_is_skipped_over(stack: Stack) -> None:
    """Skips the repeated tokens when a new agent runs a greedy request again from its start."""

    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        ids = ids_of("repeated")
        yield tokens(request, 0, ids[:3])
        yield tokens(request, 0, ids[:2])
        yield tokens(request, 2, ids[2:], "stop")

    stack.agent.script = script
    got = await stream(stack, "/v1/completions", **BODY, temperature=0)
    assert "".join(e["choices"][0]["text"] for e in got) == "repeated"


async def test_a_stream_whose_client_goes_is_cancelled(stack: Stack) -> None:
    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        for index in range(200):
            yield tokens(request, index, [7])
            await asyncio.sleep(0.02)

    stack.agent.script = script
    async with stack.client.stream(
        "POST", "/v1/completions", json={**BODY, "stream": True}
    ) as response:
        await anext(response.aiter_lines())
    await until(lambda: stack.agent.cancelled == {r.id for r in stack.agent.seen} != set())
    assert len(stack.state.dispatcher.log) == 0


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_goes_before_the_first_token(stack: Stack, streaming: bool) -> None:
    stack.agent.script = silent
    post = stack.client.post("/v1/completions", json={**BODY, "stream": streaming}, timeout=0.3)
    with pytest.raises(httpx.ReadTimeout):
        await post
    await until(lambda: stack.agent.cancelled == {r.id for r in stack.agent.seen} != set())
    assert len(stack.state.dispatcher.log) == 0


async def test_a_waiting_request_of_a_gone_client_leaves_the_queue(stack: Stack) -> None:
    queue = stack.state.queue
    await queue.route("base", "host:1")
    with pytest.raises(httpx.ReadTimeout):
        await stack.client.post("/v1/completions", json=BODY, timeout=0.3)
    async with asyncio.timeout(5):
        while await queue.depth("host:1"):
            await asyncio.sleep(0.01)


async def test_output_that_nobody_has_open_is_cancelled(stack: Stack) -> None:
    name = stack.state.dispatcher.frontend_id
    await stack.agent.send(name, Chunk("cmpl-forgotten-0", 1, 0, [5]))
    await until(lambda: "cmpl-forgotten-0" in stack.agent.cancelled)


async def test_too_many_open_requests(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> None:
    config = make_config(redis_server.url, namespace, short_dir, max_open_requests=2)
    async with stack_of(config) as stack:
        waiting = asyncio.create_task(stack.client.post("/v1/completions", json=BODY))
        await until(lambda: len(stack.state.dispatcher.log) == 1)
        response = await stack.client.post("/v1/completions", json={**BODY, "prompt": ["a", "b"]})
        assert response.status_code == 429
        assert response.headers["retry-after"]
        assert "frontend.max_open_requests" in response.json()["error"]["message"]
        never = await stack.client.post("/v1/completions", json={**BODY, "prompt": ["a", "b", "c"]})
        assert never.status_code == 400
        assert "retry-after" not in never.headers
        assert "frontend.max_open_requests" in never.json()["error"]["message"]
        waiting.cancel()
        stack.agent.script = answering([7])
        assert (await stack.client.post("/v1/completions", json=BODY)).status_code == 200


async def test_no_progress_ends_with_an_error(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> None:
    config = make_config(redis_server.url, namespace, short_dir, progress_timeout_s=0.2)
    async with stack_of(config) as stack:
        response = await stack.client.post("/v1/completions", json=BODY)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "timeout"
        await until(lambda: len(stack.agent.cancelled) == 1)


async def test_a_frontend_whose_dispatcher_breaks_ends(
    redis_server: BundledRedis,
    namespace: str,
    short_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ends the process, which would look healthy and serve no requests; the launcher restarts
    it."""

    async def beat(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(RequestQueue, "beat", beat)
    config = make_config(redis_server.url, namespace, short_dir)
    async with asyncio.timeout(30):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            assert not await serve(create_app(config, "f0"), listener)


async def test_a_client_that_goes_while_it_sends_is_no_bug(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = stack.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.2)
    writer.close()
    await writer.wait_closed()
    await asyncio.sleep(0.2)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


async def test_draining_finishes_what_is_open_and_refuses_the_rest(stack: Stack) -> None:
    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        yield tokens(request, 0, ids_of("half "))
        await more.wait()
        yield tokens(request, len(ids_of("half ")), [*ids_of("whole"), 0], "stop")

    more = asyncio.Event()
    stack.agent.script = script
    open_request = asyncio.create_task(stream(stack, "/v1/completions", **BODY))
    await until(lambda: len(stack.agent.seen) == 1)
    in_flight, dispatcher = stack.state.in_flight, stack.state.dispatcher
    draining = asyncio.create_task(drain(in_flight, dispatcher, asyncio.Queue(), 5.0))
    await until(lambda: in_flight.draining)
    refused = await stack.client.post("/v1/completions", json=BODY)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    assert (await stack.client.get("/health")).status_code == 503
    assert not draining.done()
    more.set()
    got = await open_request
    assert "".join(e["choices"][0]["text"] for e in got) == "half whole"
    await asyncio.wait_for(draining, 5)


async def test_what_the_drain_has_no_time_for_ends_with_an_error(stack: Stack) -> None:
    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        yield tokens(request, 0, ids_of("half"))
        await asyncio.Event().wait()

    stack.agent.script = script
    body = {**BODY, "stream": True}
    async with stack.client.stream("POST", "/v1/completions", json=body) as response:
        await until(lambda: len(stack.agent.seen) == 1)
        signals: asyncio.Queue[int] = asyncio.Queue()
        signals.put_nowait(15)
        await drain(stack.state.in_flight, stack.state.dispatcher, signals, 5.0)
        got = await events(response)
    assert got[-1]["error"]["code"] == "shutting_down"
