"""Dedicated devices: one model each, wider where load is, refusals that say what to add."""

from __future__ import annotations

from prism.policies.baselines import dedicated
from prism.policies.data import Activate, ModelView, Refuse, Settings
from prism.policies.placement import Hosted, Placement, Unit
from tests.policies.clusters import active, gpu, model, view
from tests.policies.loads import problem, spec


def planned(models: list[ModelView], count: int, **more: object) -> dict[str, str | None]:
    seen = view(models, [gpu(f"g{i}") for i in range(count)], **more)
    actions = dedicated.plan(seen, Settings())
    assert all(isinstance(a, Activate | Refuse) for a in actions)
    return {a.model: a.device if isinstance(a, Activate) else None for a in actions}


def test_each_model_has_a_device_of_its_own() -> None:
    models = [model(name, wanted=True) for name in "abc"]
    assert planned(models, 3) == {"a": "g0", "b": "g1", "c": "g2"}


def test_too_few_devices_go_to_those_that_requests_wait_for() -> None:
    models = [model("big", 50, wanted=True), model("asked", waiting=1), active("here", "g1")]
    assert planned(models, 2) == {"asked": "g0", "big": None}


def test_nothing_is_evicted_for_a_waiting_model() -> None:
    assert planned([active("old", "g0", idle_s=1e9), model("a", waiting=5)], 1) == {"a": None}


def test_pins_bars_and_sizes() -> None:
    models = [
        model("pinned", wanted=True, pinned_device="g0"),
        model("barred", wanted=True, barred=("g1",)),
        model("huge", 500, wanted=True),
    ]
    assert planned(models, 3) == {"huge": None, "pinned": "g0", "barred": "g2"}


def test_a_searched_placement_is_followed() -> None:
    target = Placement((Unit(("g1",), (Hosted("a"),)),))
    assert planned([model("a", wanted=True)], 2, target=target) == {"a": "g1"}


# --- search --------------------------------------------------------------------------------


def sizes(placement: Placement) -> dict[str, int]:
    assert all(len(u.models) == 1 for u in placement.units)
    used = [d for u in placement.units for d in u.devices]
    assert len(set(used)) == len(used)
    return {u.models[0].model: u.tp for u in placement.units}


def test_equal_loads_get_equal_parts() -> None:
    models = [spec(f"m{i}") for i in range(4)]
    assert sizes(dedicated.search(problem(models, 8))) == dict.fromkeys(("m0", "m1", "m2", "m3"), 2)


def test_left_devices_go_where_load_is() -> None:
    models = [spec("hot", rate=9.0), spec("cold", rate=0.1), spec("large", "65b", rate=0.1)]
    assert sizes(dedicated.search(problem(models, 8))) == {"hot": 4, "cold": 2, "large": 2}


def test_groups_stay_within_a_node() -> None:
    placement = dedicated.search(problem([spec("a", "65b"), spec("b", "65b")], 6, per_node=3))
    assert {u.devices for u in placement.units} == {("g00", "g01"), ("g03", "g04")}


def test_the_least_popular_are_refused() -> None:
    models = [spec("hot", rate=5.0), spec("cold", rate=0.1), spec("warm", rate=1.0)]
    placement = dedicated.search(problem(models, 2))
    assert placement.refused == {"cold": "no 1 devices are left for it alone; add devices"}
    assert sizes(placement) == {"hot": 1, "warm": 1}
    alone = dedicated.search(problem([spec("large", "65b", tp_degrees=(1,))], 2))
    assert alone.refused == {"large": "its weights fit at none of its TP degrees"}
