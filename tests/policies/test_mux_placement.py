"""MuxServe's Algorithm 1 against exhaustive search; mesh groups; what fits where."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest

from prism.policies.baselines import mux_placement as mux
from prism.policies.placement import Hosted, Placement, Problem, Unit
from tests.policies.loads import GB, devices, problem, random_models, spec


def test_partitions_of_a_node() -> None:
    assert list(mux.partitions(4, (1, 2, 4))) == [(4,), (2, 2), (2, 1, 1), (1, 1, 1, 1)]
    assert list(mux.partitions(3, (2,))) == [(2,)]
    assert list(mux.partitions(1, (2,))) == [()]
    assert len(list(mux.partitions(8, (1, 2, 4, 8)))) == 10


def test_mesh_groups_use_each_device_once_and_stay_within_nodes() -> None:
    cluster = devices(8, per_node=4)
    groups = list(mux.mesh_groups(cluster, (1, 2, 4)))
    node_of = {d.name: d.node for d in cluster}
    for group in groups:
        names = [name for mesh in group for name in mesh.devices]
        assert sorted(names) == sorted(node_of)
        assert all(len({node_of[n] for n in mesh.devices}) == 1 for mesh in group)
    sizes = [tuple(sorted(mesh.size for mesh in group)) for group in groups]
    assert len(set(sizes)) == len(sizes), "like nodes are not told apart"
    every = {
        tuple(sorted(a + b)) for a, b in itertools.product(mux.partitions(4, (1, 2, 4)), repeat=2)
    }
    assert set(sizes) == every


def test_large_clusters_are_thinned() -> None:
    groups = list(mux.mesh_groups(devices(64), (1, 2, 4, 8)))
    assert len(groups) == mux.GROUPS_MAX
    assert {mesh.size for mesh in groups[0]} == {8}
    assert {mesh.size for mesh in groups[-1]} == {1}


def best_by_trying_all(task: Problem) -> float:
    """Returns the largest total throughput over all mesh groups and assignments.

    Returns 0 if not all models fit.
    """
    assert task.times is not None
    planner = mux.Planner(task.models, task.devices, task.times)
    best = 0.0
    for group in mux.mesh_groups(task.devices, planner.degrees()):
        for homes in itertools.product(range(len(group)), repeat=len(task.models)):
            best = max(best, _total(planner, group, homes, task))
    return best


def _total(
    planner: mux.Planner, group: tuple[mux.Mesh, ...], homes: tuple[int, ...], task: Problem
) -> float:
    total = 0.0
    for index, mesh in enumerate(group):
        here = [m for m, home in zip(task.models, homes, strict=True) if home == index]
        found = [planner.candidates[m.name].get(mesh.size) for m in here]
        unit = tuple(c for c in found if c is not None)
        if len(unit) < len(found) or mux.kv_bytes(mesh, unit) is None:
            return 0.0
        total += planner.estimate(mesh, unit).throughput_rps
    return total


@pytest.mark.parametrize(
    ("gpus", "models", "feasible", "optimal", "worst"),
    [(2, 5, 26, 23, 0.98), (3, 5, 38, 24, 0.74), (4, 4, 40, 40, 1.0)],
)
def test_close_to_exhaustive_search_on_small_clusters(
    gpus: int, models: int, feasible: int, optimal: int, worst: float
) -> None:
    """Bounds the distance of the greedy search from the optimum on 40 random clusters of each kind.

    Wherever all models fit, it places all of them.
    """
    ratios = []
    for seed in range(40):
        task = problem(random_models(Random(seed), models), gpus)
        best = best_by_trying_all(task)
        if best:
            placement = mux.search(task)
            assert not placement.refused
            ratios.append(placement.score / best)
    assert len(ratios) == feasible
    assert max(ratios) <= 1 + 1e-9
    assert sum(ratio >= 1 - 1e-9 for ratio in ratios) >= optimal
    assert min(ratios) >= worst - 1e-9


def homes(placement: Placement) -> dict[str, int]:
    return {h.model: u.tp for u in placement.units for h in u.models}


def test_score_is_what_the_units_give() -> None:
    task = problem([spec("a", rate=2.0), spec("b", rate=0.5)], 2)
    assert mux.search(task).score == pytest.approx(2.5)


def test_a_large_model_gets_a_mesh_that_holds_it() -> None:
    models = [spec("large", "65b", rate=0.2), *(spec(f"s{i}", rate=1.0) for i in range(3))]
    placement = mux.search(problem(models, 4))
    assert not placement.refused
    assert homes(placement)["large"] >= 2


def test_light_load_uses_all_devices() -> None:
    models = [spec(f"m{i}", rate=0.1) for i in range(4)]
    placement = mux.search(problem(models, 4))
    assert all(u.models for u in placement.units)
    assert sum(u.tp for u in placement.units) == 4


def test_popular_ones_are_colocated_with_unpopular_ones() -> None:
    models = [
        spec("p0", rate=7.0),
        spec("p1", rate=7.0),
        spec("u0", rate=0.2),
        spec("u1", rate=0.2),
    ]
    placement = mux.search(problem(models, 2))
    together = [{h.model for h in u.models} for u in placement.units]
    assert not any({"p0", "p1"} <= unit for unit in together)


def test_what_fits_nowhere_is_refused_with_its_need() -> None:
    models = [spec("large", "65b", rate=0.2, tp_degrees=(1,)), spec("a")]
    placement = mux.search(problem(models, 1))
    assert list(placement.refused) == ["large"]
    assert placement.refused["large"].endswith("of weights do not fit at TP degree 1")
    crowd = [spec(f"m{i}", "13b") for i in range(3)]
    refused = mux.search(problem(crowd, 1)).refused
    assert len(refused) == 1
    assert all("no mesh has" in why for why in refused.values())


def test_no_unit_is_overfilled() -> None:
    for seed in range(10):
        models = random_models(Random(seed), 8)
        task = problem(models, 4)
        by_name = {m.name: m for m in models}
        for unit in mux.search(task).units:
            hosted = [by_name[h.model] for h in unit.models]
            need = sum(m.weight_bytes + m.kv_floor_bytes for m in hosted)
            assert need <= 72 * GB * unit.tp


def test_same_input_same_placement_in_any_order() -> None:
    models = random_models(Random(5), 6)
    first = mux.search(problem(models, 4))
    assert mux.search(problem(models[::-1], 4)) == first


def test_the_present_placement_stays_unless_another_one_is_clearly_better() -> None:
    task = problem([spec("a", rate=8), spec("b", rate=8)], 2)
    swapped = Placement((Unit(("g00",), (Hosted("b"),)), Unit(("g01",), (Hosted("a"),))))
    assert mux.search(replace(task, present=swapped)).homes("a")[0].devices == ("g01",)
    together = Placement((Unit(("g00",), (Hosted("a"), Hosted("b"))),))
    busy = problem([spec("a", rate=30), spec("b", rate=30)], 2)
    assert mux.search(replace(busy, present=together)).units == mux.search(busy).units
    for left in (Unit(("g01",)), Unit(("lost",), (Hosted("b"),))):
        part = Placement((Unit(("g00",), (Hosted("a"),)), left))
        found = mux.search(replace(task, present=part))
        assert [unit.devices for name in "ab" for unit in found.homes(name)] == [("g00",), ("g01",)]
