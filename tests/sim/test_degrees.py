"""Tensor-parallel degrees that the prism policy chooses in whole simulations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from prism.errors import ConfigError
from prism_replay.trace import TraceRequest
from prism_sim import simulate
from prism_sim.cluster.world import World
from prism_sim.core.records import Records
from prism_sim.core.setup import ActivationSettings, ClusterSetup, DegreeSetup, ModelSetup
from tests.sim.clusters import LinearCost, cluster, model, parts, request, work


def auto(name: str = "a") -> ModelSetup:
    """Makes a model whose prompt takes 1 ms a token at tp 1 and half of it at tp 2."""
    one, two = (
        dataclasses.replace(part, cost=LinearCost(1e-3 / tp, 0.01 / tp))
        for tp, part in parts().items()
    )
    found: dict[int, DegreeSetup] = {1: one, 2: two}
    return model(0, name, parts=found, degrees=(1, 2), slo_ttft_s=1.0)


def two_nodes() -> ClusterSetup:
    return cluster([auto()], gpus=4, activation=ActivationSettings(layout_s=0.0))


def run(setup: ClusterSetup, trace: Sequence[TraceRequest]) -> Records:
    return World(setup, work(setup, trace)).run()


def every(gap_s: float, begin_s: float, end_s: float) -> list[TraceRequest]:
    count = int((end_s - begin_s) / gap_s)
    return [request(begin_s + n * gap_s, "a", prompt=200) for n in range(count)]


def test_a_load_that_triples_raises_the_degree_and_no_request_fails() -> None:
    """Computes for 0.2 s of each 0.9 s, then of each 0.3 s; later lowers the degree again."""
    calm, heavy, late = every(0.9, 0.0, 300.0), every(0.3, 300.0, 900.0), every(30.0, 900.0, 2400.0)
    records = run(two_nodes(), [*calm, *heavy, *late])
    moves = [d for d in records.decisions if d.kind == "migrate"]
    assert [d.device for d in moves][:1] == ["gpu:0"]
    raised, lowered = moves
    assert raised.reason.endswith("fewer are late with tp 2")
    assert 300.0 < raised.time_s < 330.0
    assert lowered.reason == "tp 1 is enough, not 2"
    assert lowered.time_s >= 1500.0
    assert not records.errors
    assert records.ended == len(calm) + len(heavy) + len(late)


def test_a_degree_that_is_named_stays() -> None:
    setup = two_nodes()
    fixed = dataclasses.replace(setup, models=(dataclasses.replace(auto(), degrees=()),))
    records = run(fixed, every(0.25, 0.0, 300.0))
    assert [d.kind for d in records.decisions] == ["activate", "active"]


def yaml(memory: str, **more: object) -> dict[str, object]:
    return {
        "gpus": {"type": "h100", "count": 4, "memory": memory},
        "models": [{"name": "a", "shape": "Llama-3.1-8B", **more}],
        "slo": {"ttft": "1s", "tpot": "100ms"},
        "generate": {"seconds": 20, "rate": 1, "active_fraction": 1.0},
    }


def test_a_model_without_tp_gets_the_least_degree_at_which_it_fits() -> None:
    for memory, tp in (("40GiB", 1), ("16GiB", 2), ("8GiB", 4)):
        assert simulate(yaml(memory)).models["tp"][0] == tp
    with pytest.raises(ConfigError, match="raise its tp"):
        simulate(yaml("16GiB", tp=1))
