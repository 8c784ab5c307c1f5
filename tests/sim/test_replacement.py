"""SeaLLM's adaptive replacement (§4.3): searched anew on the last interval's requests, at intervals
that follow equation 8."""

from __future__ import annotations

import dataclasses

import pytest

from prism.policies import registry
from prism.policies.placement import Hosted, Placement, Problem, Unit
from prism.policies.policy import Policy
from prism_sim.cluster.world import World
from prism_sim.core.records import Records
from prism_sim.core.setup import ClusterSetup
from prism_sim.core.workload import Workload
from prism_sim.placement import replacement
from tests.sim.clusters import cluster, model, request, work

MODELS = [model(0, "a"), model(1, "b")]
TOGETHER = Placement((Unit(("gpu:0",), (Hosted("a"), Hosted("b"))), Unit(("gpu:1",), ())))
APART = Placement((Unit(("gpu:0",), (Hosted("a"),)), Unit(("gpu:1",), (Hosted("b"),))))


class Searches:
    """The first search finds TOGETHER, later ones APART; `asked`: the rates they were given."""

    def __init__(self) -> None:
        self.asked: list[dict[str, float]] = []

    def __call__(self, problem: Problem) -> Placement:
        self.asked.append({m.name: m.rate_rps for m in problem.models})
        return TOGETHER if len(self.asked) == 1 else APART

    def policy(self, name: str = "seallm") -> Policy:
        return dataclasses.replace(registry.get(name), search=self)


def busy(seconds: float, slo_e2e_s: float = 3.0) -> tuple[ClusterSetup, Workload]:
    """Makes two models that together need more than one GPU can serve in time."""
    setup = cluster(MODELS, 2, policy="seallm", search_interval_s=20.0)
    many = [request(0.25 * i, "ab"[i % 2], 200, 40) for i in range(int(seconds / 0.25))]
    found = work(setup, many)
    for i in range(len(found)):
        found.slo_e2e_s[i] = slo_e2e_s
    return setup, found


def test_a_better_placement_is_moved_to() -> None:
    setup, trace = busy(60.0)
    searches = Searches()
    records = World(setup, trace, searches.policy()).run()
    assert not records.errors
    assert len(searches.asked) > 2
    assert (records.counts["replacements"], records.counts["migrate"]) == (1, 1)
    fixed = World(setup, trace, dataclasses.replace(searches.policy(), next_interval=None))
    searches.asked.clear()
    assert sum(records.end_s) < sum(fixed.run().end_s)


def test_a_placement_that_does_worse_is_not_moved_to() -> None:
    """Finds the better placement in the first search and the worse one later."""

    class Worsens(Searches):
        def __call__(self, problem: Problem) -> Placement:
            super().__call__(problem)
            return APART if len(self.asked) == 1 else TOGETHER

    setup, trace = busy(60.0)
    searches = Worsens()
    records = World(setup, trace, searches.policy()).run()
    assert len(searches.asked) > 2
    assert "replacements" not in records.counts
    assert "migrate" not in records.counts


def test_each_search_sees_the_rates_of_its_interval() -> None:
    setup, _ = busy(10.0)
    first = [request(0.2 * i, "a", 50, 5) for i in range(100)]
    later = [request(20.0 + 0.2 * i, "b", 50, 5) for i in range(150)]
    searches = Searches()
    World(setup, work(setup, [*first, *later]), searches.policy()).run()
    whole, one, two, *_ = searches.asked
    assert whole["a"] < whole["b"]
    assert one["a"] == pytest.approx(5.0, rel=0.05)
    assert (one["b"], two["a"]) == (0.0, 0.0)
    assert two["b"] == pytest.approx(5.0, rel=0.05)


def test_the_interval_grows_while_estimates_hold_and_shrinks_when_they_do_not() -> None:
    """Applies equation 8 in a whole simulation: the fixed score of the search is the estimate."""
    setup, trace = busy(100.0, slo_e2e_s=1e9)
    for score, expected in ((1.0, 22.0), (0.5, 18.0)):
        target = dataclasses.replace(TOGETHER, score=score)
        policy = dataclasses.replace(
            registry.get("seallm"), search=lambda problem, found=target: found
        )
        world = World(setup, trace, policy)
        records = Records(trace)
        for i in range(40):
            records.end_s[i] = trace.arrival_s[i] + 1.0
        look = replacement.Replacement(policy, setup, records, world._loads or [])
        look.update(10.0, 40, target, world._simulate)
        assert look.interval_s == pytest.approx(expected)


def test_attainment_counts_what_is_known() -> None:
    _, trace = busy(10.0, slo_e2e_s=3.0)
    records = Records(trace)
    records.end_s[0], records.end_s[1] = 1.0, 9.0
    records.errors[2] = "unserved"
    records.end_s[2] = 1.0
    assert replacement.attainment(records, 0, 3, 9.0) == pytest.approx(1 / 3)
    assert replacement.attainment(records, 0, 4, 3.0) == pytest.approx(1 / 3)  # 3 is not due yet
    assert replacement.attainment(records, 0, 4, 9.0) == pytest.approx(1 / 4)
    assert replacement.attainment(records, 5, 5, 9.0) == 1.0


def test_an_alarm_for_the_next_search_does_not_lengthen_the_run() -> None:
    """Keeps the GPUs' busy fraction independent of the interval."""
    setup, trace = busy(60.0)
    setup = dataclasses.replace(setup, search_interval_s=500.0)
    world = World(setup, trace, Searches().policy())
    records = world.run()
    assert world.kernel.time_s > records.end_time_s
    assert records.end_time_s == max(records.end_s)
