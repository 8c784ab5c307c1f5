"""Tensor-parallel models in Algorithm 1 (Prism Appendix A.1.2), and the heap against the plain
algorithm."""

from __future__ import annotations

from functools import partial
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from prism.policies import kvpr
from prism.policies.bins import current_bins, need_bytes, part
from prism.policies.data import GpuView, ModelView
from tests.policies import plain_kvpr
from tests.policies.clusters import active, clusters, gpu, model


def homes(models: list[ModelView], gpus: list[GpuView], tau: float = 0.0) -> dict[str, list[str]]:
    return {name: [*home] for name, home in kvpr.place(models, gpus, tau).devices.items()}


def row(count: int, capacity: int = 100, per_node: int = 8) -> list[GpuView]:
    return [gpu(f"g{i}", capacity, node=f"n{i // per_node}") for i in range(count)]


def test_a_part_has_a_tp_th_of_weight_and_rate() -> None:
    one = part(model("a", 101, 7, tp=4, token_rate=8.0))
    assert (one.weight_bytes, one.kv_floor_bytes, one.token_rate) == (26, 2, 2.0)
    whole = model("b", 101, 7)
    assert part(whole) is whole


def test_parts_go_to_distinct_devices() -> None:
    assert homes([model("a", 80, tp=2)], row(2)) == {"a": ["g0", "g1"]}


def test_the_second_least_pressed_takes_the_second_part() -> None:
    """Skips a device with a part, although it is still the least pressed (Appendix A.1.2)."""
    models = [model("a", 8, 0, tp=2, token_rate=2.0), model("hot", 2, 0, token_rate=90.0)]
    models += [model("cold", 2, 0, token_rate=2.0)]
    placed = homes(models, row(3))
    assert placed["hot"] == ["g0"]
    assert placed["cold"] == ["g1"]
    assert placed["a"] == ["g2", "g1"]
    placement = kvpr.place(models, row(3), 0.0)
    assert placement.kvpr["g2"] < placement.kvpr["g1"] < placement.kvpr["g0"]


def test_parts_stay_within_a_node() -> None:
    models = [model("a", 80, tp=2, token_rate=1.0), model("b", 90, token_rate=5.0)]
    assert homes(models, row(4, per_node=2)) == {"b": ["g0"], "a": ["g2", "g3"]}


def test_all_parts_or_none() -> None:
    gpus = row(2, per_node=1)
    placement = kvpr.place([model("a", 20, tp=2), model("b")], gpus, 0.0)
    assert list(placement.devices) == ["b"]
    assert placement.refused["a"].startswith("its 2 parts need 0.0 MiB and an engine on each of 2")
    assert placement.refused["a"].endswith("of one node; at most 1 have both")


def test_a_tensor_parallel_model_stays_unless_the_gain_exceeds_tau() -> None:
    here = active("a", "g2", tp=2, peers=("g1",), weight=20, token_rate=1.0)
    assert homes([here], row(4), 0.0) == {"a": ["g2", "g1"]}
    hot = active("hot", "g1", token_rate=50.0, pinned_device="g1")
    assert homes([here, hot], row(4), 0.5) == {"a": ["g2", "g0"], "hot": ["g1"]}
    warm = active("warm", "g1", token_rate=0.1, pinned_device="g1", weight=1)
    assert homes([here, warm], row(4), 1.0)["a"] == ["g2", "g1"]


def test_what_devices_hold_is_kept() -> None:
    start = partial(current_bins, [active("here", "g0", token_rate=5.0)], row(2))
    placement = kvpr.place([model("a", token_rate=1.0)], (), 0.0, start)
    assert placement.devices == {"a": ("g1",)}
    assert placement.kvpr["g0"] > 0


def test_only_those_that_stay_are_in_the_bins_but_all_have_their_engines() -> None:
    models = [active("stays", "g0"), active("goes", "g0"), active("goes too", "g1")]
    bins = current_bins(models, row(2), models[:1])
    assert [list(b.models) for b in bins.values()] == [["stays"], []]
    whole = current_bins(models, row(2))
    assert [b.engines for b in bins.values()] == [b.engines for b in whole.values()]


@given(clusters(wide=True), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_properties_with_tensor_parallelism(view, tau) -> None:
    placement = kvpr.place(view.models, view.gpus, tau)
    assert set(placement.devices) | set(placement.refused) == {m.name for m in view.models}
    load = dict.fromkeys((g.name for g in view.gpus), 0)
    node = {g.name: g.node for g in view.gpus}
    for m in view.models:
        if m.name in placement.devices:
            devices = placement.devices[m.name]
            assert len(set(devices)) == len(devices) == m.tp
            assert len({node[d] for d in devices}) == 1
            for d in devices:
                load[d] += need_bytes(part(m))
    assert all(load[g.name] <= g.capacity_bytes - g.fixed_bytes for g in view.gpus)
    assert kvpr.place(view.models, view.gpus[::-1], tau) == placement


# --- the heap --------------------------------------------------------------------------------


@given(clusters(), st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_equals_the_plain_algorithm(view, tau) -> None:
    assert kvpr.place(view.models, view.gpus, tau) == plain_kvpr.place(view.models, view.gpus, tau)


def test_equals_the_plain_algorithm_on_larger_clusters() -> None:
    for seed in range(25):
        random = Random(seed)
        gpus = [
            gpu(f"g{i:02}", random.randint(60, 140), engines_free=random.randint(0, 4))
            for i in range(random.randint(3, 30))
        ]
        models = [any_model(random, i, gpus) for i in range(random.randint(10, 80))]
        tau = random.choice([0.0, 0.1, 0.5])
        assert kvpr.place(models, gpus, tau) == plain_kvpr.place(models, gpus, tau)


def any_model(random: Random, i: int, gpus: list[GpuView]) -> ModelView:
    rate = random.choice([0.0, 0.0, random.random(), 10 * random.random()])
    home = random.choice([None, None, random.choice(gpus).name])
    return model(
        f"m{i:02}",
        random.randint(1, 40),
        random.randint(0, 8),
        token_rate=rate,
        device=home,
        state="active" if home else "absent",
        barred=tuple(g.name for g in random.sample(gpus, random.choice([0, 0, 2]))),
        pinned_device=random.choice([None, None, None, random.choice(gpus).name]),
    )


# --- infeasible instances ---------------------------------------------------------------------


def fits_somehow(models: list[ModelView], gpus: list[GpuView]) -> bool:
    """Returns True if all models fit in some assignment, by trying all."""
    if not models:
        return True
    first, *rest = models
    for i, g in enumerate(gpus):
        if need_bytes(first) <= g.capacity_bytes:
            left = gpu(g.name, g.capacity_bytes - need_bytes(first))
            if fits_somehow(rest, [*gpus[:i], left, *gpus[i + 1 :]]):
                return True
    return False


def test_an_honest_report_on_instances_that_do_not_fit() -> None:
    """Compares refusals with all assignments.

    A refused model lacks exactly the stated bytes on the named device. If all models fit in some
    assignment, nearly always all are placed; if not, some model is refused.
    """
    feasible = infeasible = left_out = 0
    for seed in range(400):
        random = Random(seed)
        gpus = [gpu(f"g{i}", random.randint(50, 100)) for i in range(random.randint(1, 3))]
        models = [
            model(f"m{i}", random.randint(5, 45), random.randint(0, 9), token_rate=random.random())
            for i in range(random.randint(2, 7))
        ]
        placement = kvpr.place(models, gpus, 0.0)
        if fits_somehow(models, gpus):
            feasible += 1
            left_out += bool(placement.refused)
        else:
            infeasible += 1
            assert placement.refused
        check_report(models, gpus, placement)
    assert (feasible, infeasible) == (210, 190)
    assert left_out <= 5


def check_report(models: list[ModelView], gpus: list[GpuView], placement: kvpr.Assignment) -> None:
    by_name = {m.name: m for m in models}
    room = {g.name: g.capacity_bytes for g in gpus}
    for name, (device,) in placement.devices.items():
        room[device] -= need_bytes(by_name[name])
    for name, why in placement.refused.items():
        missing, device = int(why.split()[0]), why.split(" on ")[1].split(":")[0]
        need = need_bytes(by_name[name])
        assert missing == need - room[device] > 0
        assert missing == min(need - left for left in room.values())
