"""Changes of a cluster or its workload that must not change the figures of any policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from statistics import fmean
from typing import Any

import pytest

from prism.policies import registry
from prism.policies.knobs import Knobs
from prism.scheduler import traffic
from prism_replay.intervals import interval
from prism_replay.trace import TraceRequest
from prism_sim.cluster import view as sim_view
from prism_sim.cluster.world import World
from prism_sim.core.records import Records
from prism_sim.core.setup import ActivationSettings, ClusterSetup, ModelSetup
from tests.sim.clusters import MIB, LinearCost, cluster, model, parts, request, work

SEEDS = range(4)
RATES_RPS = {"a": 4.5, "b": 3.0, "c": 3.0, "d": 1.5, "e": 0.75}
RENAMED = {"a": "d", "b": "b", "c": "e", "d": "c", "e": "a"}
SECONDS = 40.0
every_policy = pytest.mark.parametrize("policy", registry.own_names())


def setup_of(policy: str, **changes: Any) -> ClusterSetup:
    """Makes five models of different speed and equal size, but for the last, on two GPUs."""
    models = [
        model(
            i,
            name,
            weight_bytes=(16 if name == "e" else 12) * MIB,
            parts=parts(LinearCost(2e-4, 0.01 + i / 1e4)),
        )
        for i, name in enumerate(RATES_RPS)
    ]
    made = cluster(
        models,
        2,
        policy=policy,
        search_requests=30,
        warm=False,
        activation=ActivationSettings(restart_s=2.0),
    )
    return replace(made, **changes)


def trace(seed: int) -> list[TraceRequest]:
    """Returns requests in bursts, with pauses between them."""
    random, found = Random(seed), []
    for name, rate_rps in RATES_RPS.items():
        time_s = random.expovariate(1 / 5)
        while time_s < SECONDS:
            if random.random() < 0.05:
                time_s += random.expovariate(1 / 8)
            found.append(request(time_s, name, random.randint(20, 900), random.randint(10, 300)))
            time_s += random.expovariate(rate_rps)
    return found


def run(setup: ClusterSetup, requests: Sequence[TraceRequest]) -> Records:
    return World(setup, work(setup, requests)).run()


@cache
def plain(policy: str, seed: int) -> Records:
    return run(setup_of(policy), trace(seed))


def met(records: Records, slo_s: float = 1.0) -> float:
    """Returns the fraction of requests that got their first token in time."""
    rows = enumerate(zip(records.work.arrival_s, records.first_s, strict=True))
    return fmean(i not in records.errors and first_s - at_s <= slo_s for i, (at_s, first_s) in rows)


def hurts(policy: str, setup: ClusterSetup) -> bool:
    """Returns True if fewer requests are in time on `setup` than on the unchanged cluster, by more
    than the interval of the differences over the seeds."""
    gain = interval([met(run(setup, trace(seed))) - met(plain(policy, seed)) for seed in SEEDS])
    return gain.mean < -gain.half_width


@every_policy
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_names_do_not_matter(policy: str, seed: int) -> None:
    models = tuple(replace(m, name=RENAMED[m.name]) for m in setup_of(policy).models)
    renamed = [request_of(r, 1.0, RENAMED[r.model]) for r in trace(seed)]
    found = run(setup_of(policy, models=models), renamed)
    assert found.first_s == plain(policy, seed).first_s
    assert found.end_s == plain(policy, seed).end_s


@pytest.mark.parametrize("shift", range(5))
def test_static_has_the_same_figures_under_five_renamings(shift: int) -> None:
    names = [*RATES_RPS]
    moved = dict(zip(names, names[shift:] + names[:shift], strict=True))
    models = tuple(replace(m, name=moved[m.name]) for m in setup_of("static").models)
    found = run(
        setup_of("static", models=models), [request_of(r, 1.0, moved[r.model]) for r in trace(0)]
    )
    assert met(found) == met(plain("static", 0))


@every_policy
def test_a_model_without_requests_does_not_hurt(policy: str) -> None:
    idle = model(len(RATES_RPS), "idle", weight_bytes=MIB, kv_floor_bytes=MIB // 4)
    setup = setup_of(policy, models=(*setup_of(policy).models, idle))
    assert not hurts(policy, setup)


@every_policy
def test_another_gpu_does_not_hurt(policy: str) -> None:
    assert not hurts(policy, setup_of(policy, devices=cluster([], 3).devices))


@every_policy
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_the_unit_of_time_does_not_matter(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = met(plain(policy, seed))
    twice_s = 2 * traffic.SLOT_S
    for module in (traffic, sim_view):
        monkeypatch.setattr(module, "SLOT_S", twice_s)
    slow = run(slower(setup_of(policy)), [request_of(r, 2.0, r.model) for r in trace(seed)])
    assert met(slow, 2.0) == before


def request_of(row: TraceRequest, factor: float, name: str) -> TraceRequest:
    """Returns the request of `name` at `factor` times its arrival."""
    return request(row.timestamp / 1000 * factor, name, row.input_length, row.output_length)


def slower(setup: ClusterSetup) -> ClusterSetup:
    """Returns the setup with each time doubled and each rate halved."""
    rates = ("load", "node_load", "plain_load", "peer", "network", "disk")
    activation = scaled(setup.activation, 2, "layout_s", "restart_s")
    twice = scaled(setup, 2, "interval_s", "retry_s", "rate_window_s", "patience_s", "bar_s")
    return replace(
        scaled(twice, 2, "activation_timeout_s", "search_interval_s"),
        models=tuple(map(slower_model, setup.models)),
        activation=scaled(activation, 0.5, *(f"{rate}_bytes_s" for rate in rates)),
        settings=scaled(setup.settings, 2, "idle_threshold_s", "min_idle_s"),
        limits=scaled(setup.limits, 2, "hold_s", "prefill_horizon_s", "order_age_s"),
        knobs=slower_knobs(setup.knobs),
    )


def slower_model(made: ModelSetup) -> ModelSetup:
    slow = {}
    for tp, part in made.parts.items():
        assert isinstance(part.cost, LinearCost)
        cost = LinearCost(2 * part.cost.token_s, 2 * part.cost.base_s, 2 * part.cost.context_s)
        slow[tp] = replace(part, cost=cost)
    speed = scaled(made, 0.5, "prefill_tokens_per_s")
    return replace(scaled(speed, 2, "slo_ttft_s", "slo_tpot_s"), parts=slow)


def slower_knobs(knobs: Knobs) -> Knobs:
    adbs, aegaeon = knobs.adbs, knobs.aegaeon
    return replace(
        knobs, adbs=scaled(adbs, 2, "adapt_every_s"), aegaeon=scaled(aegaeon, 2, "quota_max_s")
    )


def scaled(made: Any, factor: float, *names: str) -> Any:
    """Returns the dataclass with these fields multiplied."""
    return replace(made, **{name: factor * getattr(made, name) for name in names})
