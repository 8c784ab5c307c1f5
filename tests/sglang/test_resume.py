"""Requests that resume after the output that they already have, as if never interrupted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prism.messages.engine import Submit
from prism.messages.requests import Grammar, Request, Resume
from tests.engines.harness import DeviceUnderTest, request
from tests.sglang.models import LLAMA, prompts, spec_of

pytestmark = pytest.mark.sglang

TOKENS = 48
STOP = tuple(range(300, 1200))
GRAMMAR = Grammar("regex", "[a-z ]{200,400}")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "seed": 7},
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 1.5},
    "both, seeded": {
        "temperature": 0.8,
        "seed": 2**31 - 1,
        "frequency_penalty": 0.7,
        "presence_penalty": -0.5,
    },
    "repetition": {"repetition_penalty": 1.6},
    "least tokens": {"stop_token_ids": STOP, "min_tokens": TOKENS},
    "biased": {"logit_bias": {7: 6.0, 9: 5.5}, "temperature": 1.0, "min_p": 0.02, "seed": 3},
    "grammar": {"grammar": GRAMMAR, "temperature": 1.0, "seed": 5},
    "probabilities": {"logprobs": 2, "prompt_logprobs": True},
}


def resumed(item: Request, output_ids: list[int]) -> Request:
    new_id = f"{item.id}/{len(output_ids)}"
    return msgspec.structs.replace(item, id=new_id, resume=Resume(output_ids))


def test_the_rest_is_the_same_from_any_point(device: DeviceUnderTest) -> None:
    """Resumes greedy, seeded and penalised requests after 1, 20 and 47 of 48 tokens, in one
    batch."""
    device.activate(spec_of(LLAMA), max_running=8)
    asked = prompts(LLAMA, len(SAMPLINGS), (5, 90), seed=5)
    items = [
        request(name, LLAMA, prompt, TOKENS, **sampling)
        for (name, sampling), prompt in zip(SAMPLINGS.items(), asked, strict=True)
    ]
    device.send(Submit(items))
    whole = {i.id: s.token_ids for i, s in zip(items, device.finish(*SAMPLINGS), strict=True)}
    later = [resumed(item, whole[item.id][:cut]) for item in items for cut in (1, 20, TOKENS - 1)]
    device.send(Submit(later))
    for item, stream in zip(later, device.finish(*(i.id for i in later)), strict=True):
        name, cut = item.id.rsplit("/", 1)
        assert stream.chunks[0].first_index == int(cut)
        tokens = [token for chunk in stream.chunks for token in chunk.token_ids]
        assert tokens == whole[name][int(cut) :], item.id
        assert stream.finish_reason == "length"
        logprobs = [chunk.logprobs for chunk in stream.chunks if chunk.logprobs]
        asked = item.sampling.logprobs is not None
        assert sum(len(part.values) for part in logprobs) == (len(tokens) if asked else 0)
        assert all(chunk.prompt_logprobs is None for chunk in stream.chunks)
