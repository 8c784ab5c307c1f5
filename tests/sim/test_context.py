"""Requests longer than their model's context, or than the memory of its GPUs: each ends, and the
run continues without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from prism.engines.request_checks import check
from prism.errors import ConfigError, ContextLengthError, TooLargeError
from prism.messages.requests import Request, Sampling
from prism_sim import Results, simulate
from prism_sim.costs.shapes import CONFIGS, shape_named

POLICIES = ("prism", "static", "dedicated", "muxserve", "qlm", "aegaeon", "serverlessllm")
Rows = list[dict[str, Any]]


def setup(context_length: int | None = None, **engine: Any) -> dict[str, Any]:
    chat: dict[str, Any] = {"name": "chat", "shape": "Llama-3.1-8B", "tp": 1}
    if context_length is not None:
        chat["context_length"] = context_length
    return {
        "gpus": {"type": "h100", "count": 2, "memory": "40GiB"},
        "models": [chat, {"name": "small", "shape": "Llama-3.2-1B"}],
        "engine": engine,
        "trace": "trace",
    }


def row(at_s: float, model: str, prompt: int, output: int = 20) -> dict[str, Any]:
    return {
        "timestamp": round(at_s * 1000),
        "model": model,
        "input_length": prompt,
        "output_length": output,
    }


def usual() -> Rows:
    return [row(i / 4, ("chat", "small")[i % 2], 100 + 37 * i % 400) for i in range(40)]


def run(rows: Sequence[dict[str, Any]], policy: str = "prism", **given: Any) -> Results:
    ordered = sorted(rows, key=lambda each: float(each["timestamp"]))
    return simulate(setup(**given), ordered, changes={"policy": policy})


def request(prompt: int, output: int) -> Request:
    return Request("r", "chat", [1] * prompt, Sampling(max_tokens=output), 0.0, 1.0, 1.0, "f")


def others(found: Results, prompt: int) -> Rows:
    """Returns the rows of the table of requests without those of `prompt` tokens."""
    rows = found.requests.drop("index").to_dicts()
    return [each for each in rows if each["prompt_tokens"] != prompt]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_of_a_million_tokens_ends_alone(policy: str) -> None:
    found = run([*usual(), row(2, "chat", 1_000_000)], policy)
    total = found.summary.total
    assert total.errors == {"context_length_exceeded": 1}
    assert (total.requests, total.completed) == (41, 40)
    missed = total.attainment["1"]
    assert missed.ttft is not None
    assert missed.ttft <= 40 / 41
    (long,) = [r for r in found.requests.to_dicts() if r["prompt_tokens"] == 1_000_000]
    assert (long["device"], long["started_s"], long["met_ttft"]) == (None, None, False)
    assert long["end_s"] == long["arrival_s"] == 2
    assert others(found, 1_000_000) == others(run(usual(), policy), 0)


@pytest.mark.parametrize(("prompt", "output"), [(80, 20), (81, 20), (99, 1), (100, 1)])
def test_the_limit_is_that_of_the_live_system(prompt: int, output: int) -> None:
    try:
        check(request(prompt, output), 100, 1000)
        live = {}
    except ContextLengthError as error:
        live = {error.code: 1}
    found = run([row(0, "chat", prompt, output)], context_length=100)
    assert found.summary.total.errors == live


def test_a_context_may_be_longer_than_the_shape_says() -> None:
    rows = [*usual(), row(2, "chat", 140_000)]
    assert run(rows).summary.total.errors == {"context_length_exceeded": 1}
    assert not run(rows, context_length=200_000).summary.total.errors


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("engine", [{}, {"memory_reserve": False}])
def test_a_prompt_larger_than_the_memory_ends_alone(policy: str, engine: dict[str, Any]) -> None:
    context = 1_000_000
    found = run([*usual(), row(2, "chat", 900_000)], policy, context_length=context, **engine)
    assert found.summary.total.errors == {"kv_memory_exceeded": 1}
    plain = run(usual(), policy, context_length=context, **engine)
    assert others(found, 900_000) == others(plain, 0)


def test_the_longest_prompt_that_fits_is_served() -> None:
    """Checks the boundary: 36 GiB less weights and engine, at 128 KiB of KV for each token."""
    context = 1_000_000
    long = run([*usual(), row(2, "chat", 900_000)], context_length=context)
    most = long._run.setup.models[0].kv_tokens
    assert 150_000 < most < 165_000
    last = [*usual(), row(2, "chat", 900_000), row(4, "chat", most - 20)]
    assert run(last, context_length=context).summary.total.errors == {"kv_memory_exceeded": 1}
    more = [*usual(), row(2, "chat", 900_000), row(4, "chat", most - 19)]
    assert run(more, context_length=context).summary.total.errors == {"kv_memory_exceeded": 2}


def test_a_model_whose_requests_never_fit_is_too_large() -> None:
    with pytest.raises(TooLargeError, match="chat: weights, engine and one request of 800020 tok"):
        run([row(0, "chat", 800_000), row(1, "chat", 900_000)], context_length=1_000_000)


def test_a_context_of_no_tokens() -> None:
    with pytest.raises(ConfigError, match=r"models\[0\]\.context_length: 0 must be >= 1"):
        run(usual(), context_length=0)


def test_contexts_of_public_models() -> None:
    """Uses max_position_embeddings of the published config.json files."""
    found = {name: shape_named(name).decoder.context_tokens for name in CONFIGS}
    assert found["meta-llama/Llama-3.1-8B"] == found["Qwen/Qwen2.5-7B"] == 131072
    assert found["meta-llama/Llama-2-7B"] == found["meta-llama/Llama-2-70B"] == 4096
    assert found["huggyllama/llama-65b"] == found["facebook/opt-6.7b"] == 2048
    assert found["Qwen/Qwen3-32B"] == 40960
    assert found["mistralai/Mistral-7B-v0.1"] == 32768
