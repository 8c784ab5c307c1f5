"""Models that the prism policy gives up in whole simulations."""

from __future__ import annotations

from prism_replay.trace import TraceRequest
from prism_sim.cluster.world import World
from prism_sim.core.records import Records
from prism_sim.core.setup import ActivationSettings
from tests.sim.clusters import MIB, cluster, model, request, work


def run(seconds: float, *later: TraceRequest) -> Records:
    """Simulates two models of which one fits: 4 requests a second of a, 1 of b, then `later`."""
    models = [model(i, name, weight_bytes=40 * MIB) for i, name in enumerate("ab")]
    setup = cluster(models, activation=ActivationSettings(layout_s=0.0))
    trace = [request(n * 0.25, "a") for n in range(int(seconds * 4))]
    trace += [request(n * 1.0, "b") for n in range(int(seconds))]
    records = World(setup, work(setup, [*trace, *later])).run()
    assert records.ended == len(trace) + len(later)
    return records


def test_the_model_with_fewer_requests_is_refused_by_name_and_the_other_is_served() -> None:
    records = run(300.0)
    refusals = [d for d in records.decisions if d.kind == "refuse" and "overload" in d.reason]
    assert {d.model for d in refusals} == {"b"}
    unserved = [i for i, error in records.errors.items() if error == "unserved"]
    assert len(unserved) > 250
    assert {records.work.models[records.work.model[i]] for i in unserved} == {"b"}
    assert len([d for d in records.decisions if d.kind == "activate"]) <= 4


def test_a_model_is_served_again_once_the_other_is_idle() -> None:
    records = run(300.0, *(request(350.0 + n, "b") for n in range(60)))
    late = [i for i in records.errors if records.work.arrival_s[i] > 355.0]
    assert late == []
