"""SLOs of requests: bounds of what they may ask for, and shedding while others are late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai

from prism.messages.requests import Chunk, Failure, Request, Started
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import Stack, ids_of, make_config, stack_of
from tests.frontend.scripted_agent import answering, tokens
from tests.frontend.test_completions import events

BODY = {"model": "base", "prompt": "x", "temperature": 0}


async def test_bounds_and_shedding(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> None:
    config = make_config(redis_server.url, namespace, short_dir, shed=True)
    models = [
        msgspec.structs.replace(m, slo_ttft_s=0.3, slo_least_ttft_s=0.05, slo_least_tpot_s=0.02)
        for m in config.models
    ]
    async with stack_of(msgspec.structs.replace(config, models=models)) as stack:
        post = stack.client.post
        refused = await post("/v1/completions", json=BODY | {"slo_ttft_ms": 49})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "slo_ttft_ms")
        assert "slo_ttft_ms: 49 is below the model's minimum of 50" in refused.text
        refused = await post("/v1/completions", json=BODY | {"slo_tpot_ms": 19.5})
        assert "slo_tpot_ms: 19.5 is below the model's minimum of 20" in refused.text
        # The agent is silent: this one misses its 60 ms, and is late after the model's 300 ms.
        tight = BODY | {"slo_ttft_ms": 60, "slo_tpot_ms": 20}
        late = asyncio.create_task(post("/v1/completions", json=tight))
        log = stack.state.dispatcher.log
        while not stack.agent.seen:
            await asyncio.sleep(0.01)
        [asked] = stack.agent.seen
        assert asked.slo_ttft_s == 0.06
        assert log.late("base", asked.arrival_unix_s + 0.29, 0.3) == 0
        while not log.late("base", time.time(), 0.3):
            await asyncio.sleep(0.01)
        shed = await post("/v1/completions", json=BODY)
        assert (shed.status_code, shed.headers["retry-after"]) == (429, "2")
        assert shed.json()["error"]["code"] == "shed"
        assert "1 requests for base have missed their TTFT SLO" in shed.text
        # Another model is served, and so is this one when nothing is late any more.
        stack.agent.script = answering([*ids_of("yes"), 0])
        chat = {"model": "chat", "messages": [{"role": "user", "content": "x"}], "temperature": 0}
        assert (await post("/v1/chat/completions", json=chat)).status_code == 200
        late.cancel()
        while len(log):
            await asyncio.sleep(0.01)
        assert (await post("/v1/completions", json=BODY)).status_code == 200
        # The one that was late counts, though it never had a token; the one that was shed does not.
        missed = 'prism_slo_total{frontend="f0",met="false",model="base",slo="ttft"} 1.0'
        assert missed in (await stack.client.get("/metrics")).text


def started_late(stack: Stack) -> None:
    """Makes the agent start each request 0.3 s after its arrival, and each choice 1 s later."""

    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        began_unix_s = request.arrival_unix_s + 0.3 + int(request.id.rpartition("-")[2])
        stack.state.dispatcher.log.take_start(Started(request.id, 1, "host:0", began_unix_s))
        yield tokens(request, 0, [7])
        await asyncio.sleep(0.025)
        yield tokens(request, 1, [7, 7], "stop")

    stack.agent.script = script


async def usage_of(stack: Stack, **changes: Any) -> dict[str, Any]:
    answer = await stack.client.post("/v1/completions", json=BODY | changes)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


async def test_the_usage_says_whether_the_slo_was_met(stack: Stack) -> None:
    started_late(stack)
    slo = (await usage_of(stack, return_slo=True))["slo"]
    assert set(slo) == {"queue_s", "ttft", "tpot"}
    assert slo["queue_s"] == 0.3
    assert (slo["ttft"]["target_s"], slo["tpot"]["target_s"]) == (2.0, 0.2)  # the model's
    for each in (slo["ttft"], slo["tpot"]):
        assert each["met"] is (each["actual_s"] <= each["target_s"])
    assert slo["tpot"]["actual_s"] >= 0.01  # two more tokens after 25 ms, by another clock
    # Setting an SLO also asks for the report; each of its targets is judged by itself.
    long_ms, short_ms = 3.6e6, 1e-3
    slo = (await usage_of(stack, slo_ttft_ms=long_ms, slo_tpot_ms=short_ms))["slo"]
    assert (slo["ttft"]["target_s"], slo["tpot"]["target_s"]) == (3600, 1e-6)
    assert (slo["ttft"]["met"], slo["tpot"]["met"]) == (True, False)
    slo = (await usage_of(stack, slo_ttft_ms=short_ms, slo_tpot_ms=long_ms))["slo"]
    assert (slo["ttft"]["met"], slo["tpot"]["met"]) == (False, True)
    for changes in ({}, {"slo_ttft_ms": long_ms, "return_slo": False}):
        assert "slo" not in await usage_of(stack, **changes)


async def test_the_slo_of_several_choices_and_of_one_token(stack: Stack) -> None:
    started_late(stack)
    slo = (await usage_of(stack, return_slo=True, n=2, seed=1))["slo"]
    assert slo["queue_s"] == 1.3
    stack.agent.script = answering([7])  # without a Started message
    slo = (await usage_of(stack, return_slo=True))["slo"]
    assert (slo["queue_s"], slo["tpot"]) == (None, None)
    assert slo["ttft"]["target_s"] == 2.0


async def test_the_slo_of_a_stream_and_of_a_repeat(stack: Stack) -> None:
    started_late(stack)
    body = BODY | {"return_slo": True}
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with stack.client.stream("POST", "/v1/completions", json=streamed) as response:
        *others, last = await events(response)
    assert last["usage"]["slo"]["queue_s"] == 0.3
    assert all(each["usage"] is None for each in others)
    key = {"Idempotency-Key": "once"}
    answers = [
        (await stack.client.post("/v1/completions", json=body, headers=key)).json()
        for _ in range(2)
    ]
    assert answers[0]["usage"].pop("slo")["queue_s"] == 0.3
    assert answers[1]["usage"].pop("slo") is None  # nothing was computed
    assert answers[0] == answers[1]
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        said = await client.completions.create(
            model="base", prompt="x", extra_body={"slo_ttft_ms": 3.6e6}
        )
    assert said.usage is not None
    assert (said.usage.model_extra or {})["slo"]["ttft"]["met"] is True


async def test_priorities_have_bounds(stack: Stack) -> None:
    stack.agent.script = answering([7])
    for asked in (None, 0, -100):
        await usage_of(stack, priority=asked)
    assert [request.priority for request in stack.agent.seen] == [0, 0, -100]
    for asked in (1, -101):
        refused = await stack.client.post("/v1/completions", json=BODY | {"priority": asked})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
        assert f"{asked} is not between -100 and 0" in refused.text
