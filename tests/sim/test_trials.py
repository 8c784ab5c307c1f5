"""Simulations for the searches of a live cluster: requests and step times as measured."""

from __future__ import annotations

import numpy as np
import pytest

from prism.policies.data import Traffic
from prism.policies.placement import StepTimes
from prism_sim.core.setup import ClusterSetup
from prism_sim.core.workload import Workload
from prism_sim.costs.model import GpuUsage, PromptChunk
from prism_sim.costs.table import TableCost
from prism_sim.live.drawn_requests import drawn
from prism_sim.live.trials import measured_steps
from tests.sim.clusters import cluster, model

MODELS = [model(0, "often"), model(1, "rare", context_tokens=40), model(2, "never")]
TRAFFIC = {
    "often": Traffic(
        mean_rps=3.0,
        prompt_tokens=300.0,
        prompt_std_tokens=150.0,
        output_tokens=50.0,
        output_std_tokens=50.0,
    ),
    "rare": Traffic(mean_rps=1.0, prompt_tokens=100.0, output_tokens=20.0),
    "never": Traffic(prompt_tokens=100.0, output_tokens=20.0),
}


def work(seed: int = 0) -> tuple[ClusterSetup, Workload]:
    setup = cluster(MODELS)
    return setup, drawn(setup.models, TRAFFIC, 4000, seed)


def test_requests_have_the_measured_rates_and_lengths() -> None:
    _, found = work()
    which, arrival_s = np.array(found.model), np.array(found.arrival_s)
    assert (which == 2).sum() == 0
    assert (which == 0).mean() == pytest.approx(0.75, abs=0.03)
    assert np.diff(arrival_s).mean() == pytest.approx(0.25, rel=0.05)
    assert np.diff(arrival_s).std() == pytest.approx(0.25, rel=0.05)
    prompt, output = (
        np.array(lengths)[which == 0] for lengths in (found.prompt_tokens, found.output_tokens)
    )
    assert (prompt.mean(), prompt.std()) == pytest.approx((300, 150), rel=0.1)
    assert (output.mean(), output.std()) == pytest.approx((50, 50), rel=0.15)
    assert output.min() >= 1


def test_a_request_fits_into_its_context() -> None:
    _, found = work()
    rare = np.array(found.model) == 1
    assert set(np.array(found.prompt_tokens)[rare]) == {20}
    assert set(np.array(found.output_tokens)[rare]) == {20}


def test_requests_have_the_slos_of_their_models() -> None:
    _, found = work()
    assert found.slo_e2e_s[0] == pytest.approx(1.0 + 0.1 * (found.output_tokens[0] - 1))


def test_a_seed_has_the_same_requests() -> None:
    assert work(1)[1] == work(1)[1]
    assert work(1)[1] != work(2)[1]


def test_steps_take_as_long_as_measured() -> None:
    """Adds the times of prompts and decodes in one step."""
    times = StepTimes(
        prefill_s=lambda model, tp, batch, tokens, share: batch * tokens / 500,
        decode_s=lambda model, tp, batch, tokens, share: 0.02 + batch * 0.001,
    )
    cost = TableCost(measured_steps("a", 1, times, 16))
    assert cost.prefill_s(250) == pytest.approx(0.5)
    assert [cost.decode_s(n, 1000) for n in (1, 4, 16)] == pytest.approx([0.021, 0.024, 0.036])
    assert cost.step_s((PromptChunk(250),), 4, 1000) == pytest.approx(0.524)
    assert cost.usage((PromptChunk(250),), 0, 0) == GpuUsage(1.0, 0.0)
    assert cost.usage((), 4, 1000) == GpuUsage(0.0, 1.0)
