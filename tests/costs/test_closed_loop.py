"""The closed loop against cases worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.calibration.closed_loop import ClosedLoop, run_closed_loop
from prism_sim.costs.model import GpuUsage, PromptChunk


@dataclass
class Even:
    """A step takes 1 s, and 0.01 s more for each prompt token."""

    prompt_tokens: int = 0
    decoded: int = 0

    def step_s(self, chunks: Sequence[PromptChunk], batch: int, context_tokens: int) -> float:
        tokens = sum(chunk.tokens for chunk in chunks)
        self.prompt_tokens += tokens
        self.decoded += batch
        return 1.0 + 0.01 * tokens

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        return self.step_s((PromptChunk(tokens, context_tokens),), 0, 0)

    def decode_s(self, batch: int, context_tokens: int) -> float:
        return self.decode_run_s(batch, context_tokens, 1)

    def decode_run_s(self, batch: int, context_tokens: int, steps: int) -> float:
        self.decoded += batch * steps
        return float(steps)

    def decode_steps(self, batch: int, context_tokens: int, seconds: float, limit: int) -> int:
        return min(limit, int(seconds))

    def usage(self, chunks: Sequence[PromptChunk], batch: int, context_tokens: int) -> GpuUsage:
        return GpuUsage(1.0, 1.0)


LOAD = ClosedLoop(
    input_tokens=100, output_tokens=11, concurrency=1, requests=3, batch_max=9, mixed=False
)


def test_one_client_waits_for_nobody() -> None:
    latency = run_closed_loop(Even(), LOAD)
    assert (latency.ttft_s, latency.tpot_s) == (2.0, 1.0)


def test_clients_that_start_together_queue_for_prompts() -> None:
    load = replace(LOAD, concurrency=2, requests=2, step_tokens=100)
    # first tokens at 2 and 4; the first one's decoding waits for the second's prompt
    latency = run_closed_loop(Even(), load)
    assert latency.ttft_s == pytest.approx((2 + 4) / 2)
    assert latency.tpot_s == pytest.approx((12 + 10) / 2 / 10)


def test_a_step_takes_several_prompts_and_parts_of_one() -> None:
    load = replace(LOAD, concurrency=2, requests=2, step_tokens=150)
    # one step of 100 + 50, one of 50
    assert run_closed_loop(Even(), load).ttft_s == pytest.approx((2.5 + 4.0) / 2)


def test_mixed_steps_decode_beside_prompts() -> None:
    load = replace(LOAD, concurrency=2, requests=2, step_tokens=101, mixed=True)
    # the second step has 100 prompt tokens of the second request and a decode of the first
    latency = run_closed_loop(Even(), load)
    assert latency.ttft_s == pytest.approx((2.01 + 4.0) / 2, rel=0.01)
    assert latency.tpot_s == pytest.approx((11 + 10) / 2 / 10, rel=0.01)


def test_memory_bounds_the_batch() -> None:
    load = replace(LOAD, concurrency=2, requests=2, batch_max=1)
    assert run_closed_loop(Even(), load).ttft_s == pytest.approx((2 + 14) / 2)


def test_spread_clients_do_not_meet() -> None:
    load = replace(LOAD, concurrency=2, requests=2, spread_s=100.0)
    assert run_closed_loop(Even(), load) == run_closed_loop(Even(), LOAD)


loads = st.builds(
    ClosedLoop,
    input_tokens=st.integers(1, 200),
    output_tokens=st.integers(1, 40),
    concurrency=st.integers(1, 9),
    requests=st.integers(1, 30),
    batch_max=st.integers(1, 9),
    mixed=st.booleans(),
    step_tokens=st.integers(1, 300),
    spread_s=st.floats(0, 50),
)


@given(load=loads)
def test_every_token_is_computed_once(load: ClosedLoop) -> None:
    cost = Even()
    run_closed_loop(cost, load)
    assert cost.prompt_tokens == load.requests * load.input_tokens
    assert cost.decoded == load.requests * (load.output_tokens - 1)
