"""SeaLLM's placement search, unserved index, group merging, and the adaptive interval."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import Random

import pytest

from prism.policies.baselines import groups, seallm
from prism.policies.baselines.seallm import SeallmSettings
from prism.policies.placement import ModelSpecView, Placement, PlacementOutcome, Problem
from tests.policies.loads import GB, spec
from tests.policies.toy import toy_problem


def test_unserved_requests_count_before_latency() -> None:
    outcome = PlacementOutcome({"a": 9, "b": 9}, {"a": 3, "b": 3}, {"a": 5.0, "b": 80.0})
    assert seallm.unserved_index(outcome, "a", 0.0001) == pytest.approx(3.0005)
    a, b = (seallm.unserved_index(outcome, s, 0.0001) for s in "ab")
    assert b > a
    assert seallm.unserved_index(outcome, "nowhere", 0.0001) == 0


def homes(placement: Placement) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for unit in placement.units:
        for host in unit.models:
            found.setdefault(host.model, []).append(unit.tp)
    return found


def test_every_service_has_a_home_and_groups_hold_two() -> None:
    models = [spec(f"m{i}", rate=0.5, tp_degrees=(1,)) for i in range(8)]
    placement = seallm.search(toy_problem(models, 4))
    assert sorted(homes(placement)) == sorted(m.name for m in models)
    assert max(len(u.models) for u in placement.units) == 2
    three = seallm.search(toy_problem(models, 4), SeallmSettings(services_max=3))
    assert max(len(u.models) for u in three.units) == 3


def test_more_than_two_share_a_group_where_groups_are_few() -> None:
    """Places each service (equation 3)."""
    models = [spec(f"m{i}", rate=0.3, kv_floor_bytes=GB) for i in range(8)]
    placement = seallm.search(toy_problem(models, 2))
    assert sorted(homes(placement)) == sorted(m.name for m in models)
    assert not placement.refused


def test_groups_are_filled_with_replicas() -> None:
    """Allocates until nothing fits: two services on four GPUs get replicas (Algorithm 1)."""
    models = [spec("a", rate=3.0, tp_degrees=(1,)), spec("b", rate=0.5, tp_degrees=(1,))]
    assert homes(seallm.search(toy_problem(models, 4))) == {"a": [1] * 4, "b": [1] * 4}


def test_replicas_leave_room_for_the_kv_of_all() -> None:
    """Checks memory "with profiled memory usage" (§4.1)."""
    large = spec("large", "13b", rate=0.1, tp_degrees=(1,), kv_floor_bytes=GB)

    def found(rate: float) -> dict[str, list[int]]:
        hot = spec("hot", rate=rate, tp_degrees=(1,), kv_floor_bytes=GB)
        return homes(seallm.search(toy_problem([hot, large], 2)))

    assert found(60.0) == {"hot": [1], "large": [1]}
    assert found(0.5) == {"hot": [1, 1], "large": [1, 1]}
    assert seallm.expected_kv_bytes(large, None) == 0


def test_small_groups_are_merged_until_a_large_service_fits() -> None:
    models = (spec("large", "65b"), *(spec(f"m{i}") for i in range(3)))
    problem = toy_problem(list(models), 4)
    made = seallm.group_partition(problem, 1)
    assert sorted(g.mesh.size for g in made) == [1, 1, 2]
    assert [g.mesh.size for g in seallm.group_partition(problem, 2)] == [2, 2]
    two = toy_problem([spec("x", "65b"), spec("y", "65b")], 4)
    assert [g.mesh.size for g in seallm.group_partition(two, 1)] == [2, 2]
    many = toy_problem([spec(f"m{i}") for i in range(20)], 4)
    assert [g.mesh.size for g in seallm.group_partition(many, 1)] == [1, 1, 1, 1]


def test_groups_are_merged_within_a_node_only() -> None:
    problem = toy_problem([spec("large", "65b")], 4)
    apart = tuple(
        type(d)(d.name, d.capacity_bytes, node=f"n{i}") for i, d in enumerate(problem.devices)
    )
    alone = Problem(problem.models, apart, problem.times, problem.simulate)
    assert [g.mesh.size for g in seallm.group_partition(alone, 1)] == [1, 1, 1, 1]
    assert list(seallm.search(alone).refused) == ["large"]


def test_no_group_is_overfilled() -> None:
    for seed in range(5):
        random = Random(seed)
        models = [spec(f"m{i}", random.choice(["7b", "13b", "30b"]), rate=0.4) for i in range(6)]
        by_name = {m.name: m for m in models}
        for unit in seallm.search(toy_problem(models, 4, length_s=20.0)).units:
            hosted = [by_name[h.model] for h in unit.models]
            assert sum(m.weight_bytes + m.kv_floor_bytes for m in hosted) <= 72 * GB * unit.tp


def test_the_least_requested_group_is_served_first() -> None:
    problem = toy_problem([spec("hot", rate=5.0), spec("cold", rate=0.1), spec("new")], 2)
    hot, cold, _ = problem.models
    made = groups.uniform_groups(problem.devices, 1)
    made[0].models.append(hot)
    made[1].models.append(cold)
    assert [g.models for g in groups.by_rate(made)] == [[cold], [hot]]
    made[1].models.append(hot)  # a replica takes half of the rate
    assert groups.rates(made) == {0: 2.5, 1: 2.6}


def test_the_result_is_the_best_of_all_group_sizes() -> None:
    models = [spec("a", rate=2.0), spec("b", "13b", rate=1.0), spec("c", "30b", rate=0.3)]
    problem = toy_problem(models, 4)
    found = seallm.search(problem)
    assert problem.simulate is not None
    assert found.score == problem.simulate(found).attainment
    for size in (1, 2, 4):
        made = seallm.group_partition(problem, size)
        assert found.score >= filled(problem, made, models)


def filled(problem: Problem, made: Sequence[groups.Group], models: list[ModelSpecView]) -> float:
    """Returns the attainment if the same groups are filled in the order of the models."""
    for group in made:
        for model in models:
            if group.can_allocate(model, 2) and not any(model in g.models for g in made):
                group.models.append(model)
    assert problem.simulate is not None
    return problem.simulate(groups.as_placement(made, models)).attainment


def test_the_interval_follows_the_error() -> None:
    """Checks equation 8 with beta = 0.1."""
    assert seallm.next_interval(100.0, real=0.8, estimated=0.95) == pytest.approx(90.0)
    assert seallm.next_interval(100.0, real=0.9, estimated=0.95) == pytest.approx(110.0)
    assert seallm.next_interval(100.0, real=1.2, estimated=1.0, beta=0.3) == pytest.approx(130.0)
    assert seallm.next_interval(100.0, real=1.5, estimated=1.0, beta=0.5) == 100.0
    assert seallm.next_interval(100.0, real=0.5, estimated=0.0) == pytest.approx(90.0)
    assert seallm.next_interval(100.0, real=0.0, estimated=0.0) == pytest.approx(110.0)


def test_a_home_for_every_service_comes_before_attainment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places a service with few simulated requests, too (equation 3)."""
    problem = toy_problem([spec("often"), spec("rarely")], 2)
    without = Placement((), {"rarely": "no room"})
    placements = {1: without, 2: Placement(())}

    def allocated(
        problem: Problem, made: Sequence[groups.Group], alpha: float, services_max: int
    ) -> list[tuple[Placement, PlacementOutcome]]:
        unserved = {"often": made[0].mesh.size - 1}
        return [(placements[made[0].mesh.size], PlacementOutcome({"often": 10}, unserved, {}))]

    monkeypatch.setattr(seallm, "_allocated", allocated)
    assert len(groups.degrees(problem)) > 1
    found = seallm.search(problem)
    assert not found.refused
    assert found.score == 0.9


def test_a_replica_that_made_it_worse_is_not_kept() -> None:
    """Keeps the best step of a size, the last one of equals."""
    models = [spec("a", rate=3.0, tp_degrees=(1,)), spec("b", rate=0.5, tp_degrees=(1,))]

    def searched(worse_from: int) -> int:
        def simulate(placement: Placement) -> PlacementOutcome:
            hosted = sum(len(unit.models) for unit in placement.units)
            return PlacementOutcome({"a": 10}, {"a": 5 if hosted >= worse_from else 0}, {"a": 1.0})

        problem = dataclasses.replace(toy_problem(models, 4), simulate=simulate)
        return sum(len(unit.models) for unit in seallm.search(problem).units)

    assert searched(worse_from=9) == 8
    assert searched(worse_from=7) == 6


def test_larger_groups_hold_more_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the limit of services for partitions with few groups, so that all services are placed.

    Otherwise no group of several GPUs could be chosen.
    """
    limits: dict[int, int] = {}

    def allocated(
        problem: Problem, made: Sequence[groups.Group], alpha: float, services_max: int
    ) -> list[tuple[Placement, PlacementOutcome]]:
        limits[len(made)] = services_max
        return [(Placement(()), PlacementOutcome({"m0": 1}, {}, {}))]

    monkeypatch.setattr(seallm, "_allocated", allocated)
    seallm.search(toy_problem([spec(f"m{i}") for i in range(5)], 4))
    assert limits == {4: 2, 2: 3, 1: 5}
