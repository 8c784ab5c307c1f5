"""Ablations change only the part that they name."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from lab.papers.ablations import mlfq, mux_planners
from lab.papers.ablations import variants as ablations
from prism.errors import ConfigError
from prism.policies import registry
from prism.policies.baselines import mux_placement
from prism.policies.multiplexing.steps import DeviceStepView, EngineStepView, Phase, StepRequest
from prism.policies.placement import DeviceSpecView, ModelSpecView, Placement, Problem, StepTimes
from tests.policies.clusters import SETTINGS, active, gpu, model, summary, view

GIB = 1 << 30
CHANGED = {
    ("prism", "in-order"): {"plan"},
    ("qlm-first-idle", "by-deadline"): {"assign"},
    ("muxserve++", "given"): {"search"},
    ("muxserve++", "listed"): {"search"},
    ("muxserve", "greedy"): {"search"},
    ("muxserve", "fcfs"): {"steps"},
    ("muxserve", "unit"): {"search"},
    ("muxserve", "unit-fcfs"): {"search", "steps"},
    ("muxserve", "unit-rr"): {"search", "steps"},
    ("muxserve", "own-kv"): {"search", "kv_blocks"},
    ("muxserve", "temporal"): {"search", "kv_blocks", "steps"},
    ("muxserve", "fixed-sm"): {"steps"},
    ("muxserve", "published"): {"search", "steps"},
    ("muxserve", "published-fcfs"): {"search", "steps"},
    ("dedicated", "published"): {"search"},
    ("seallm", "F"): {"steps"},
    ("seallm", "M"): {"steps"},
    ("seallm", "P"): {"plan", "search", "steps"},
    ("seallm", "A"): {"next_interval"},
}


@pytest.mark.parametrize(("policy", "variant"), ablations.NAMES)
def test_nothing_else_changes(policy: str, variant: str) -> None:
    whole, found = registry.get(policy), ablations.get(policy, variant)
    other = {f.name for f in fields(whole) if getattr(whole, f.name) != getattr(found, f.name)}
    assert other == CHANGED[policy, variant]


def test_unknown_ones_are_named() -> None:
    assert ablations.get("prism") is registry.get("prism")
    with pytest.raises(ConfigError, match="'x' of 'prism' is not one of in-order"):
        ablations.get("prism", "x")
    with pytest.raises(ConfigError, match="of 'static' is not one of none"):
        ablations.get("static", "x")


def problem() -> Problem:
    """Makes two models on 2 + 2 GPUs: small and popular, large and rarely used."""
    models = (
        ModelSpecView("large", 60 * GIB, 100, GIB, 0.1, 100, 100, tp_degrees=(1, 2)),
        ModelSpecView("small", 10 * GIB, 100, GIB, 10.0, 100, 100, tp_degrees=(1, 2)),
    )
    devices = tuple(DeviceSpecView(f"g{i}", 70 * GIB, f"n{i // 2}") for i in range(4))
    seconds = StepTimes(lambda m, tp, b, t, s: 0.01 * b / tp, lambda m, tp, b, t, s: 0.001)
    return Problem(models, devices, seconds)


def test_greedy_takes_the_mesh_with_most_free_memory() -> None:
    placement = mux_planners.greedy(problem())
    assert not placement.refused
    homes = {name: placement.homes(name)[0].devices for name in ("small", "large")}
    # the popular one chose first, so that the other finds more room elsewhere
    assert set(homes["small"]).isdisjoint(homes["large"])


def test_partitions_are_equal_and_fit() -> None:
    given = problem()
    placement = ablations.partitioned(mux_placement.search)(given)
    sizes = {m.name: m.weight_bytes for m in given.models}
    for unit in placement.units:
        limits = [host.kv_limit_bytes or 0 for host in unit.models]
        weights = sum(-(-sizes[host.model] // unit.tp) for host in unit.models)
        assert len(set(limits)) <= 1
        assert not unit.models or sum(limits) + weights <= 70 * GIB


def test_muxserve_as_listed_takes_the_first_of_equal_meshes() -> None:
    """Has equal gains under light load; Prism's own search compares strain."""
    given = problem()
    models = tuple(replace(m, weight_bytes=10 * GIB, tp_degrees=(1,)) for m in given.models)
    light = replace(given, models=tuple(replace(m, rate_rps=0.1) for m in models))
    listed = ablations.get("muxserve++", "listed").search
    assert listed is not None
    homes = {name: listed(light).homes(name)[0].devices for name in ("small", "large")}
    assert homes == {"small": ("g0",), "large": ("g0",)}
    spread = mux_placement.search(light)
    assert spread.homes("small")[0].devices != spread.homes("large")[0].devices


def test_models_in_order_stay_where_the_list_puts_them() -> None:
    gpus = [gpu("g0"), gpu("g1")]
    models = [model(name, wanted=True) for name in "abcd"]
    placed = [summary(a) for a in ablations.in_order(view(models, gpus), SETTINGS)]
    homes = {"a": "g0", "b": "g0", "c": "g1", "d": "g1"}
    assert sorted(placed) == [("activate", name, home) for name, home in homes.items()]
    busy = [active(name, "g0", token_rate=50.0, running=9, waiting=9) for name in "ab"]
    crowded = view([*busy, model("c"), model("d")], gpus)
    assert ablations.get("prism").plan(crowded, SETTINGS)
    assert not ablations.in_order(crowded, SETTINGS)


def test_a_search_as_given_spreads_no_model_further_than_its_operator_said() -> None:
    given = problem()
    huge = replace(given.models[0], name="huge", tp=2)
    seen: list[ModelSpecView] = []

    def search(asked: Problem) -> Placement:
        seen.extend(asked.models)
        return Placement(())

    ablations.as_given(search)(replace(given, models=(*given.models, huge)))
    assert [m.tp_degrees for m in seen] == [(1,), (1,), (2,)]


def test_one_unit_holds_all() -> None:
    given = problem()
    near = replace(given, devices=tuple(replace(d, node="n") for d in given.devices))
    wide = tuple(replace(m, tp_degrees=(1, 2, 4)) for m in given.models)
    placement = ablations.together(mux_placement.search)(replace(near, models=wide))
    assert [len(unit.devices) for unit in placement.units] == [4]
    assert {host.model for host in placement.units[0].models} == {"large", "small"}


def request(name: str, prompt: int, executed_s: float = 0.0, waited_s: float = 0.0) -> StepRequest:
    return StepRequest(name, float(len(name)), prompt, prompt, executed_s, waited_s)


def test_feedback_queues_know_a_request_by_its_own_past() -> None:
    settings = mlfq.MlfqSettings(quantum_s=0.1, prefill_tokens_per_s=1000.0)
    levels = [mlfq.level(request("r", p), settings) for p in (50, 99, 150, 350)]
    assert levels == [0, 0, 1, 2]
    assert mlfq.level(request("r", 50, executed_s=0.35), settings) == 2


def test_feedback_queues_serve_the_first_queue_then_the_starved() -> None:
    settings = mlfq.MlfqSettings(quantum_s=0.1, prefill_tokens_per_s=1000.0, starvation_s=9.0)

    def chosen(old: StepRequest) -> str:
        engines = (
            EngineStepView("a", decode=(old,)),
            EngineStepView("b", prefill=(request("new", 50),)),
        )
        return mlfq.choose(DeviceStepView(10.0, engines, GIB), settings).jobs[0].model

    assert chosen(request("o", 50, executed_s=3.0)) == "b"
    assert chosen(request("o", 50, executed_s=3.0, waited_s=9.5)) == "a"
    busy = EngineStepView("a", busy=frozenset({Phase.DECODE}), prefill=(request("new", 5),))
    assert not mlfq.choose(DeviceStepView(0.0, (busy,), GIB), settings).jobs
