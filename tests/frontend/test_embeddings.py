"""POST /v1/embeddings: OpenAI's interface to embedding models."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prism.engines.fake import expected_embedding
from prism.messages.model_spec import EmbeddingSpec
from prism.messages.requests import Chunk, Failure, Request
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import Stack, ids_of, make_config, stack_of
from tests.frontend.scripted_agent import died, silent

SIZE = 8
BODY: dict[str, Any] = {"model": "base", "input": "the dog"}


async def answer(request: Request) -> AsyncIterator[Chunk | Failure]:
    """Answers like the fake engine."""
    found = expected_embedding(request.prompt_ids, SIZE).tobytes()
    yield Chunk(request.id, request.attempt, 0, [], "stop", embedding=found)


@pytest.fixture
async def stack(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> AsyncIterator[Stack]:
    """Yields a cluster in which `chat` generates text and `base` makes embeddings."""
    config = make_config(redis_server.url, namespace, short_dir, shed=True)
    chat, base = config.models
    spec = EmbeddingSpec(SIZE, dimensions=(4,))
    base = msgspec.structs.replace(base, embedding=spec, slo_ttft_s=0.3)
    async with stack_of(msgspec.structs.replace(config, models=[chat, base])) as made:
        made.agent.script = answer
        yield made


async def test_the_openai_sdk_gets_vectors(stack: Stack) -> None:
    """Covers base64 (the SDK's default) and floats, texts and token ids, single and several
    inputs."""
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        one, two = ids_of("the dog"), ids_of("fox")
        for given in ("the dog", one, ["the dog"], [one]):
            made = await client.embeddings.create(model="base", input=given)
            assert made.data[0].embedding == expected_embedding(one, SIZE).tolist()
            assert (made.model, made.usage.prompt_tokens) == ("base", len(one))
        for several in (["the dog", "fox"], [one, two]):
            made = await client.embeddings.create(
                model="base", input=several, encoding_format="float"
            )
            vectors = [expected_embedding(ids, SIZE).tolist() for ids in (one, two)]
            assert [each.embedding for each in made.data] == vectors
            assert [each.index for each in made.data] == [0, 1]
            assert made.usage.total_tokens == len(one) + len(two)


async def test_cut_vectors_have_length_one(stack: Stack) -> None:
    asked = BODY | {"dimensions": 4, "encoding_format": "base64"}
    made = (await stack.client.post("/v1/embeddings", json=asked)).json()
    found = np.frombuffer(base64.b64decode(made["data"][0]["embedding"]), "<f4")
    whole = expected_embedding(ids_of("the dog"), SIZE)[:4]
    assert np.allclose(found, whole / np.linalg.norm(whole))
    assert "completion_tokens" not in made["usage"]
    whole_size = await stack.client.post("/v1/embeddings", json=BODY | {"dimensions": SIZE})
    assert len(whole_size.json()["data"][0]["embedding"]) == SIZE


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"model": "chat"}, "model", "chat does not have embeddings"),
        ({"dimensions": 5}, "dimensions", "5 is not supported by base; give one of 4, 8"),
        ({"input": []}, "input", "has 0 inputs; give 1 to 2048"),
        ({"input": [[]]}, "input", "input: is empty"),
        ({"input": ["x", 3]}, "input", "must be a string"),
        ({"input": [10**6]}, "input", "outside the vocabulary"),
        (
            {"input": [5] * 256},
            "input",
            "the input's 256 and the 1 reserved after it exceed it by 1: shorten the input",
        ),
        ({"slo_tpot_ms": 5}, "slo_tpot_ms", "unknown field"),
        ({"encoding_format": "int8"}, "encoding_format", "encoding_format"),
        ({"priority": 10**6}, "priority", "is not between"),
    ],
)
async def test_what_is_wrong_is_named(
    stack: Stack, changes: dict[str, Any], param: str, says: str
) -> None:
    refused = await stack.client.post("/v1/embeddings", json=BODY | changes)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert says in error["message"]
    assert stack.agent.seen == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ],
)
async def test_an_embedding_model_generates_no_text(
    stack: Stack, path: str, body: dict[str, Any]
) -> None:
    refused = await stack.client.post(path, json=body | {"model": "base"})
    assert refused.status_code == 400
    assert "model_makes_embeddings" in refused.text
    assert "use /v1/embeddings" in refused.text


async def test_it_is_tried_again_and_counted_as_any_request(stack: Stack) -> None:
    """Reports the time to the answer as TTFT."""

    async def dies_once(request: Request) -> AsyncIterator[Chunk | Failure]:
        if request.attempt == 1:
            yield died(request)
        else:
            async for chunk in answer(request):
                yield chunk

    stack.agent.script = dies_once
    body = BODY | {"return_slo": True}
    made = (await stack.client.post("/v1/embeddings", json=body)).json()
    assert len(made["data"][0]["embedding"]) == SIZE
    assert [seen.attempt for seen in stack.agent.seen] == [1, 2]
    slo = made["usage"]["slo"]
    assert slo["ttft"]["met"] is True
    assert slo["tpot"] is None
    text = (await stack.client.get("/metrics")).text
    samples = {
        s.name: s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.labels.get("model") == "base"
    }
    assert samples["prism_ttft_seconds_count"] == 1
    assert samples["prism_requests_total"] == 1
    assert samples["prism_prompt_tokens_total"] == len(ids_of("the dog"))


async def test_a_key_gets_one_answer(stack: Stack) -> None:
    post, headers = stack.client.post, {"Idempotency-Key": "k"}
    first = await post("/v1/embeddings", json=BODY, headers=headers)
    again = await post("/v1/embeddings", json=BODY, headers=headers)
    assert first.json() == again.json()
    assert len(stack.agent.seen) == 1
    other = await post("/v1/embeddings", json=BODY | {"input": "fox"}, headers=headers)
    assert other.json()["error"]["code"] == "idempotency_key_reused"


async def test_late_ones_shed_others_and_a_client_that_goes_cancels(stack: Stack) -> None:
    stack.agent.script = silent
    asking = asyncio.create_task(stack.client.post("/v1/embeddings", json=BODY))
    log = stack.state.dispatcher.log
    while not log.late("base", time.time(), 0.3):
        await asyncio.sleep(0.01)
    shed = await stack.client.post("/v1/embeddings", json=BODY)
    assert (shed.status_code, shed.json()["error"]["code"]) == (429, "shed")
    asking.cancel()
    while not stack.agent.cancelled:
        await asyncio.sleep(0.01)
    assert len(log) == 0
