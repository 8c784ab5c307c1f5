"""Runs of decode steps under step control, on the shipped costs: the same as single steps where
shares of the compute, quotas and retractions decide."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from prism_replay.trace import TraceRequest
from prism_sim.cluster.world import World
from prism_sim.core.setup import ClusterSetup, EngineSettings
from prism_sim.scenario.scenario import load
from tests.sim.clusters import MIB, cluster, model, parts, request
from tests.sim.test_conservation import NAMES, assert_equal, odd_cost, simulate, step_by_step

CROWD = """
gpus: {type: h100, count: %d, memory: 40GiB}
models:
  - {name: chat-8b, shape: Llama-3.1-8B}
  - {name: code-7b, shape: Qwen2.5-7B}
  - {name: small-1b, shape: Llama-3.2-1B, count: 2}
generate: {seconds: 8, rate: 24, active_fraction: 0.4}
policy: muxserve
patience: 5s
"""


@pytest.mark.parametrize("gpus", [1, 2])
def test_adbs_past_what_the_gpus_can_do(tmp_path: Path, gpus: int) -> None:
    """Retracts a hundred requests on one GPU; on two, all models decode side by side for long."""
    path = tmp_path / "crowd.yaml"
    path.write_text(CROWD % gpus)
    scenario = load(path)
    runs = World(scenario.setup, scenario.work).run()
    assert_equal(runs, World(step_by_step(scenario.setup), scenario.work).run())
    assert (runs.counts.get("retractions", 0) > 50) == (gpus == 1)


def random_case(seed: int, policy: str, serial: bool) -> tuple[ClusterSetup, list[TraceRequest]]:
    draw = random.Random(seed)
    gpus, kv = draw.choice([1, 1, 2, 3]), draw.choice([1, 8])
    models = [
        model(
            index,
            name,
            tp=draw.choice([1, 1, 2] if gpus > 1 else [1]),
            weight_bytes=draw.choice([8, 16, 40]) * MIB,
            token_bytes=1024 * kv,
            kv_floor_bytes=draw.choice([0, MIB]) * kv,
            parts=parts(odd_cost(index, draw.choice([0, 1e-6])), kv),
        )
        for index, name in enumerate(NAMES[: draw.randint(1, 4)])
    ]
    engine = EngineSettings(max_running=draw.choice([2, 16]), serial_phases=serial)
    seconds = draw.choice([1.0, 3.0, 30.0])
    trace = [
        request(
            draw.random() * seconds, draw.choice(NAMES), draw.randint(1, 600), draw.randint(1, 400)
        )
        for _ in range(draw.randint(1, 60))
    ]
    return cluster(models, gpus, engine=engine, policy=policy, search_requests=10), trace


SEEDS = {"muxserve": (6, 14, 33, 52, 72, 81), "seallm": (10, 43, 82)}


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize(("policy", "seed"), [(p, s) for p, many in SEEDS.items() for s in many])
def test_cases_that_differed(policy: str, seed: int, serial: bool) -> None:
    setup, trace = random_case(seed, policy, serial)
    assert_equal(simulate(setup, trace)[1], simulate(step_by_step(setup), trace)[1])
