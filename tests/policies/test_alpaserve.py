"""AlpaServe's search: buckets, devices per bucket, greedy selection against trying everything."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from random import Random

import pytest

from prism.policies.baselines import alpaserve, groups, seallm
from prism.policies.placement import (
    Hosted,
    ModelSpecView,
    Placement,
    PlacementOutcome,
    Problem,
    Search,
    Unit,
)
from tests.policies.loads import devices, spec
from tests.policies.toy import small, toy_problem


def names(buckets: Sequence[Sequence[ModelSpecView]]) -> list[list[str]]:
    return [[m.name for m in bucket] for bucket in buckets]


def test_buckets_of_like_size() -> None:
    alike = [spec("a"), spec("b", "13b")]
    assert [names(b) for b in alpaserve.bucketings(alike)] == [[["a", "b"]]]
    mixed = [spec("large", "65b"), *alike]
    assert [names(b) for b in alpaserve.bucketings(mixed)] == [
        [["a", "b", "large"]],
        [["a", "b"], ["large"]],
    ]


def test_devices_by_computation_but_enough_for_the_weights() -> None:
    hot, large = [spec("hot", rate=50.0)], [spec("large", "65b", rate=0.01)]
    parts = alpaserve.split([hot, large], devices(8))
    assert parts is not None
    assert [len(p) for p in parts] == [6, 2]
    assert alpaserve.split([large, large], devices(3)) is None
    even = alpaserve.split([[spec("a", rate=0.0)], [spec("b", rate=0.0)]], devices(4))
    assert even is not None
    assert [len(p) for p in even] == [2, 2]


def test_every_model_is_replicated_while_there_is_room() -> None:
    problem = toy_problem([spec("a", rate=2.0), spec("b", rate=0.5)], 2)
    placement = alpaserve.search(problem)
    assert [len(u.models) for u in placement.units] == [2, 2] or placement.score == 1.0
    assert not placement.refused


@pytest.mark.parametrize("search", [alpaserve.search, seallm.search])
def test_a_model_has_no_more_copies_than_it_may(search: Search) -> None:
    models = [dataclasses.replace(spec("a", rate=2.0), replicas_max=2), spec("b", rate=0.5)]
    placement = search(toy_problem(models, 4))
    assert len(placement.homes("a")) <= 2
    assert not placement.refused


def test_a_large_model_has_groups_of_its_own_where_that_is_better() -> None:
    models = [spec("large", "65b", rate=0.5), *(spec(f"s{i}", rate=2.0) for i in range(4))]
    placement = alpaserve.search(toy_problem(models, 8, length_s=15.0))
    assert not placement.refused
    by_size = {u.tp for u in placement.units if u in placement.homes("large")}
    assert min(by_size) >= 2


def test_models_that_fit_nowhere_are_refused() -> None:
    models = [spec("large", "65b", tp_degrees=(4,)), spec("a")]
    placement = alpaserve.search(toy_problem(models, 2))
    assert placement.refused == {"large": "no GPU group has room for it"}
    assert placement.homes("a")
    nothing = alpaserve.search(toy_problem([spec("large", "65b", tp_degrees=(4,))], 2))
    assert list(nothing.refused) == ["large"]


def test_a_model_whose_requests_would_be_late_has_a_home_all_the_same() -> None:
    """Checks that models with late requests are placed, although others' latency grows."""

    def simulate(placement: Placement) -> PlacementOutcome:
        late = {"late"} & {h.model for u in placement.units for h in u.models}
        return PlacementOutcome(
            {"a": 9, "late": 1}, {"a": 0, "late": 1}, {"a": 2.0 if late else 1.0}
        )

    problem = dataclasses.replace(toy_problem([spec("a"), spec("late")], 2), simulate=simulate)
    placement = alpaserve.search(problem)
    assert not placement.refused
    assert placement.homes("late")


def best_by_trying_all(problem: Problem) -> float:
    """Returns the best attainment over uniform groups and all subsets of models in each group."""
    assert problem.simulate is not None
    best = 0.0
    for size in groups.degrees(problem):
        meshes = groups.uniform_groups(problem.devices, size)
        subsets = [
            chosen
            for count in range(len(problem.models) + 1)
            for chosen in itertools.combinations(problem.models, count)
            if fits(chosen, size)
        ]
        for choice in itertools.product(subsets, repeat=len(meshes)):
            units = tuple(
                Unit(g.mesh.devices, tuple(Hosted(m.name) for m in chosen))
                for g, chosen in zip(meshes, choice, strict=True)
            )
            best = max(best, problem.simulate(Placement(units)).attainment)
    return best


def fits(models: Sequence[ModelSpecView], size: int) -> bool:
    return sum(-(-m.weight_bytes // size) for m in models) <= 72e9


def test_close_to_the_best_selection() -> None:
    ratios = []
    for seed in range(12):
        random = Random(seed)
        models = [
            spec(f"m{i}", random.choice(["7b", "13b", "30b"]), rate=random.uniform(0.2, 1.5))
            for i in range(3)
        ]
        problem = small(toy_problem(models, 2, length_s=30.0))
        ratios.append(alpaserve.search(problem).score / best_by_trying_all(problem))
    assert sum(ratio >= 1 - 1e-9 for ratio in ratios) == 11
    assert min(ratios) >= 0.95


@pytest.mark.parametrize("seed", range(2))
def test_the_fast_variant_is_nearly_as_good(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    models = [
        spec(f"m{i}", random.choice(["7b", "13b"]), rate=random.uniform(0.2, 1.5)) for i in range(5)
    ]
    problem = toy_problem(models, 4)
    full = alpaserve.search(problem).score
    monkeypatch.setattr(alpaserve, "PAIRS_MAX", 0)
    assert alpaserve.search(problem).score >= 0.95 * full
