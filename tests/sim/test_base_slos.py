"""SLOs from the P95 latencies on dedicated GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from prism_sim.cluster.world import World
from prism_sim.output.summary import summarize
from prism_sim.scenario.base_slos import base_slos
from prism_sim.scenario.scenario import load
from tests.sim.clusters import cluster, model, request, work

CONFIG = """
gpus: {type: h100, count: 2}
models:
  - {name: a, shape: Llama-3.1-8B}
  - {name: b, shape: Llama-3.2-1B}
generate: {seconds: 60, rate: 4}
base_slos: true
"""


def test_a_model_alone_sets_its_own() -> None:
    """Prompts of 100 tokens take 10 ms, decode steps 10 ms and a little for the context."""
    setup = cluster([model(0, "a"), model(1, "b"), model(2, "idle")])
    trace = [request(3.0 * i, "ab"[i % 2], 100 * (1 + i % 2), 20) for i in range(20)]
    a, b, idle = base_slos(setup, work(setup, trace))
    assert a == pytest.approx((0.01, 0.0101, 0.01 + 19 * 0.0101), rel=0.01)
    assert b == pytest.approx((0.02, 0.0102, 0.02 + 19 * 0.0102), rel=0.01)
    assert idle == tuple(map(max, a, b))


def test_the_yaml_asks_for_them(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CONFIG)
    one, ten = load(path), load(path, {"slo_scale": 10, "rate_scale": 2})
    assert one.setup.models[1].slo_ttft_s < one.setup.models[0].slo_ttft_s < 0.1
    for i in (0, 1):
        slo_s = one.setup.models[i].slo_ttft_s
        assert ten.setup.models[i].slo_ttft_s == pytest.approx(10 * slo_s)
    first = ten.work.model[0]
    assert ten.work.slo_tpot_s[0] == ten.setup.models[first].slo_tpot_s
    alone = load(path, {"policy": "dedicated"})
    met = summarize(World(alone.setup, alone.work).run(), (1.0,)).total.attainment["1"]
    assert [met.ttft, met.tpot, met.e2e] == pytest.approx([0.95] * 3, abs=0.01)
