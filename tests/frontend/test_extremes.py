"""Extreme numbers in a body are rejected, or fit the engine's tensors; no engine dies of them."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.errors import RequestError
from prism.frontend.dispatch.request_log import RequestLog
from prism.frontend.live_config import LiveConfig
from prism.frontend.protocol.bodies import parse_body
from prism.frontend.protocol.chat_types import ChatBody
from prism.frontend.protocol.openai_types import CompletionBody, GenerationBody
from prism.frontend.requests.model_catalog import ModelCatalog
from prism.frontend.requests.specs import SpecBuilder
from prism.messages.requests import Request, Sampling
from tests.frontend.conftest import Stack, make_config
from tests.frontend.tiny_model import VOCAB_SIZE

CONTEXT = 256
EDGES = [0, 1, 2, CONTEXT, VOCAB_SIZE, 2**15, 2**16, 2**24, 2**30, 2**31, 2**32, 2**53, 2**62]
EDGES += [2**63, 2**64, 2**127, 10**30, 10**300]
INTEGERS = [sign * edge + step for edge in EDGES for sign in (1, -1) for step in (-1, 0, 1)]
FLOATS = [5e-324, 1e-320, 1e-46, 1e-38, 1e-7, 0.5, 1.0, 1.0000001, 2.0, 3.4e38, 3.5e38, 1.7e308]
NUMBERS = st.sampled_from([*INTEGERS, *FLOATS, *(-each for each in FLOATS), -0.0, True])
SINGLE = (
    "max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty",
    "slo_ttft_ms", "slo_tpot_ms", "n", "best_of", "logprobs", "top_logprobs", "min_p",
    "repetition_penalty", "min_tokens", "echo",
)  # fmt: skip
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(SINGLE, NUMBERS),
    "stop_token_ids": st.lists(NUMBERS, max_size=3) | st.just([1] * 1025),
    "stop": st.sampled_from(["x" * 1024, "x" * 1025, ["y"] * 16, ["y"] * 17, ""]),
    "logit_bias": st.dictionaries(st.sampled_from(["0", "99999999999"]), NUMBERS, max_size=2),
}
# Most bodies have a single field that may be wrong, so that many are accepted.
FEW = st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=2, unique=True)
BODIES = FEW.flatmap(lambda names: st.fixed_dictionaries({n: FIELDS[n] for n in names}))
PROMPTS = st.just("x") | st.lists(NUMBERS, min_size=1, max_size=3)


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> SpecBuilder:
    """Returns a builder of requests that cannot be sent."""
    config = make_config("", "n", tmp_path_factory.mktemp("models"))
    log = RequestLog(open_max=1024)
    catalog = asyncio.run(ModelCatalog.load(config.models))
    dispatcher = cast("Any", SimpleNamespace(frontend_id="f0", log=log))
    return SpecBuilder(LiveConfig(config), catalog, dispatcher)


def request_of(specs: SpecBuilder, kind: type[GenerationBody], body: dict[str, Any]) -> Request:
    """Returns the request as it would be in the queue. Raises RequestError."""
    parsed = parse_body(kind, json.dumps(body).encode())
    if isinstance(parsed, ChatBody):
        spec = asyncio.run(specs.chat(parsed))
    else:
        assert isinstance(parsed, CompletionBody)
        spec = asyncio.run(specs.completion(parsed))
    request = spec.requests[-1]
    return msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request)


def check_fits(sampling: Sampling) -> None:
    """Asserts that the values fit the types of the engines' tensors without a relevant loss."""
    assert 1 <= sampling.max_tokens < CONTEXT
    assert sampling.top_k == -1 or 1 <= np.int32(sampling.top_k) < VOCAB_SIZE
    assert 0 < np.float32(sampling.top_p) <= 1
    assert 0 <= np.float32(sampling.temperature) <= 2
    assert 0 <= np.float32(sampling.min_p) <= 1
    assert 0 < np.float32(sampling.repetition_penalty) <= 2
    assert 0 <= sampling.min_tokens <= sampling.max_tokens
    assert sampling.logprobs is None or 0 <= sampling.logprobs <= 20
    assert all(0 <= i < VOCAB_SIZE and abs(b) <= 100 for i, b in sampling.logit_bias.items())
    for penalty in (sampling.frequency_penalty, sampling.presence_penalty):
        assert -2 <= np.float32(penalty) <= 2
    if sampling.seed is not None:
        np.int64(sampling.seed)  # raises what does not fit
    assert all(0 <= token_id < VOCAB_SIZE for token_id in sampling.stop_token_ids)


def check(specs: SpecBuilder, kind: type[GenerationBody], body: dict[str, Any]) -> None:
    refusal: RequestError | None = None
    try:
        request = request_of(specs, kind, body)
    except RequestError as error:
        refusal = error
    if refusal is not None:
        assert (refusal.status, bool(refusal.param)) == (400, True), str(refusal)
        return
    check_fits(request.sampling)
    assert all(0 <= token_id < VOCAB_SIZE for token_id in request.prompt_ids)
    assert 0 < request.slo_ttft_s <= 3600
    assert 0 < request.slo_tpot_s <= 3600


@settings(max_examples=600, deadline=None)
@given(body=BODIES, prompt=PROMPTS)
def test_a_completion_is_refused_by_name_or_fits(
    specs: SpecBuilder, body: dict[str, Any], prompt: Any
) -> None:
    check(specs, CompletionBody, {"model": "base", "prompt": prompt, **body})


@settings(max_examples=200, deadline=None)
@given(body=BODIES, limit=NUMBERS | st.none())
def test_a_conversation_is_refused_by_name_or_fits(
    specs: SpecBuilder, body: dict[str, Any], limit: Any
) -> None:
    said = [{"role": "user", "content": "x"}]
    body = {"model": "chat", "messages": said, "max_completion_tokens": limit, **body}
    check(specs, ChatBody, body)


def test_more_than_the_vocabulary_is_all_tokens(specs: SpecBuilder) -> None:
    for top_k, expected in ((VOCAB_SIZE - 1, VOCAB_SIZE - 1), (VOCAB_SIZE, -1), (2**31 - 1, -1)):
        body = {"model": "base", "prompt": "x", "top_k": top_k}
        assert request_of(specs, CompletionBody, body).sampling.top_k == expected


@pytest.mark.parametrize("top_k", [2**31, 10**30])
async def test_a_number_beyond_32_bits_is_refused_over_http(stack: Stack, top_k: int) -> None:
    body = {"model": "base", "prompt": "x", "top_k": top_k}
    response = await stack.client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "top_k"
    assert not stack.agent.seen


@pytest.mark.parametrize("change", [{"n": True}, {"echo": 0}, {"logprobs": True}])
def test_zero_is_not_false_and_true_is_not_one(specs: SpecBuilder, change: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="Input should be"):
        request_of(specs, CompletionBody, {"model": "base", "prompt": "x", **change})


def test_no_likeliest_tokens_are_still_log_probabilities(specs: SpecBuilder) -> None:
    body = {"model": "base", "prompt": "x", "logprobs": 0}
    assert request_of(specs, CompletionBody, body).sampling.logprobs == 0
