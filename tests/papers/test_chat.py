"""MuxServe's Figure 7: what its testbed measured, its placements, and the traces."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

import pytest

from lab.papers.ablations import mux_published
from lab.papers.muxserve import muxserve_chat as chat
from lab.papers.study.trial import ModelMeasure, TrialOutcome
from prism.policies.placement import DeviceSpecView, ModelSpecView, Problem, StepTimes
from prism_replay.trace import TraceRequest

GIB = 1 << 30


def problem(rate_rps: float, gpus: int = 32) -> Problem:
    names = [f"llm-{i}" for i in range(1, 17)]
    models = tuple(ModelSpecView(n, GIB, 1, 1, rate_rps / 16, 100, 260) for n in names)
    devices = tuple(DeviceSpecView(f"g{i:02}", 80 * GIB, f"n{i // 8}") for i in range(gpus))
    return Problem(models, devices, StepTimes(lambda *_: 1.0, lambda *_: 1.0))


@pytest.mark.parametrize("system", ["muxserve", "spatial", "temporal"])
@pytest.mark.parametrize("rate", chat.RATES)
def test_the_published_placements_fit_the_testbed(system: str, rate: float) -> None:
    found = mux_published.search(system)(problem(16 * rate))
    housed = Counter(hosted.model for unit in found.units for hosted in unit.models)
    assert housed == {f"llm-{i}": 1 for i in range(1, 17)}
    used = [device for unit in found.units for device in unit.devices]
    assert len(used) == len(set(used)) == {32: 32, 28: 28}[len(used)]
    assert all(len({int(d[1:]) // 8 for d in unit.devices}) == 1 for unit in found.units)
    assert not mux_published.search(system)(problem(16 * rate, gpus=8)).units


def test_placements_are_those_of_the_nearest_rate() -> None:
    def homes(rate: float) -> dict[str, tuple[int, float, int | None]]:
        units = mux_published.search("muxserve")(problem(16 * rate)).units
        return {h.model: (u.tp, h.sm_share, h.kv_limit_bytes) for u in units for h in u.models}

    assert homes(2.97)["llm-1"] == (2, 0.9, int(0.435 * 80 * GIB))
    assert homes(9.5) == homes(9.7)
    assert homes(9.5)["llm-1"] == (8, 0.9, int(0.516 * 80 * GIB))
    spatial = mux_published.search("spatial")(problem(16 * 4.75)).units
    alone = {u.models[0].model: u.tp for u in spatial}
    # The two hottest 13B models had one GPU each, the other four two.
    assert [alone[f"llm-{i}"] for i in (1, 3, 2, 5, 6, 12)] == [1, 1, 2, 2, 2, 2]


def test_the_measured_figures_have_the_papers_factor() -> None:
    measured = chat.read_measured()
    assert set(measured) == {(system, rate) for system in chat.PLACED for rate in chat.RATES}
    assert {len(rows) for rows in measured.values()} == {16}

    def rate_of(system: str, rate: float) -> float:
        return chat._mean(measured[system, rate], "throughput_rps")

    over = {
        baseline: [rate_of("muxserve", rate) / rate_of(baseline, rate) for rate in chat.RATES]
        for baseline in chat.PUBLISHED_CHAT
    }
    assert over["spatial"] == pytest.approx([1.08, 1.16, 1.25, 1.42, 1.38], abs=0.01)
    assert over["temporal"] == pytest.approx([1.20, 1.97, 1.34, 1.46, 1.46], abs=0.01)


def test_throughput_is_each_models_until_its_last_request() -> None:
    def measure(requests: int, ended_s: float) -> ModelMeasure:
        return ModelMeasure(requests, 0, ended_s, 0.0)

    found = TrialOutcome({}, models={"a": measure(30, 10.0), "b": measure(10, 20.0)})
    assert chat.throughput(found) == pytest.approx((30 * 3.0 + 10 * 0.5) / 40)
    assert chat.throughput(TrialOutcome({})) is None


@pytest.mark.parametrize(("ours", "agrees"), [(1.25, True), (1.3, False), (0.7, False)])
def test_near_is_within_a_quarter_at_every_rate(ours: float, agrees: bool) -> None:
    assert chat.near("x", {1.0: 2.0, 2.0: ours}, {1.0: 2.0, 2.0: 1.0}).agrees is agrees
    assert chat.near("x", {1.0: None}, {1.0: 2.0}).agrees is None


def test_a_peak_moves_requests_to_the_middle() -> None:
    trace = [
        TraceRequest(timestamp=100.0 * i, model="m", input_length=1, output_length=1)
        for i in range(1000)
    ]
    found = [r.arrival_s for r in chat.peaked(trace, 100.0)]
    assert found == sorted(found)
    assert 0 <= found[0] < found[-1] <= 100.0
    assert fmean(found) == pytest.approx(50.0, abs=1.0)
    middle = sum(45 <= t <= 55 for t in found)
    assert 2.0 < middle / 100 < 3.5
