"""Extreme values of a request's sampling: the request is refused or served, and the engine
lives."""

from __future__ import annotations

from typing import Any

import pytest

from prism.messages.engine import Submit
from tests.engines.harness import DeviceUnderTest, request
from tests.sglang.models import LLAMA, greedy, prompts, spec_of

pytestmark = pytest.mark.sglang

SAMPLED = {"temperature": 1.0, "seed": 1}
ACCEPTED: dict[str, dict[str, Any]] = {
    "top-k-all": {"top_k": 2**31 - 1},
    "top-k-sglang-all": {"top_k": 2**30},
    "top-k-one": {"top_k": 1},
    "top-p-least": {"top_p": 1e-6},
    "cold": {"temperature": 5e-324},
    "coldest-sampled": {"temperature": 1e-6},
    "hot": {"temperature": 2.0},
    "seed-least": {"seed": -(2**63)},
    "seed-most": {"seed": 2**63 - 1},
    "penalties": {"frequency_penalty": -2.0, "presence_penalty": 2.0},
    "stop-most": {"stop_token_ids": (2**31 - 1,)},
    "stops": {"stop_token_ids": tuple(range(10**6, 10**6 + 1024))},
}
REFUSED: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 2**31},
    "top-k-negative": {"top_k": -2},
    "top-p-denormal": {"top_p": 1e-320},
    "top-p-none": {"top_p": 0.0},
    "heat": {"temperature": 1e300},
    "seed": {"seed": 2**63},
    "stop": {"stop_token_ids": (2**31,)},
    "penalty": {"frequency_penalty": 1e39},
}


def test_extreme_values_end_no_engine(device: DeviceUnderTest) -> None:
    device.activate(spec_of(LLAMA), max_running=8)
    [prompt] = prompts(LLAMA, 1, (20, 20))
    made = {
        name: request(name, LLAMA, prompt, 4, **{**SAMPLED, **change})
        for name, change in (ACCEPTED | REFUSED).items()
    }
    device.send(Submit([*made.values(), request("plain", LLAMA, prompt)]))
    served = device.finish(*ACCEPTED)
    assert [s.failure for s in served] == [None] * len(ACCEPTED)
    failures = [s.failure for s in device.finish(*REFUSED)]
    assert [f.code for f in failures if f] == ["invalid_request_error"] * len(REFUSED)
    [plain] = device.finish("plain")
    assert plain.token_ids == greedy(LLAMA, prompt, 16)
