"""Policies that simulate placements (AlpaServe, SeaLLM) in a cluster of scripted agents."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from prism.cluster import simulated_search
from prism.cluster.placement_search import SearchInterval
from prism.cluster.simulated_search import SearchInput, found_by
from prism.cluster.state.scheduler_state import SchedulerState
from prism.cluster.view import build_view
from prism.errors import PlacementSearchError
from prism.messages.agent import ModelReport
from prism.messages.model_spec import ExpectedLoad, ModelSpec
from prism.policies.placement import Hosted, Placement, Unit
from prism.process import LoopWatchdog
from tests.cluster.conftest import Cluster, spec
from tests.cluster.scripted import eventually
from tests.cluster.test_cluster_view import make_state, report, seen

POLICIES = ("alpaserve", "seallm")
APART = Placement((Unit(("host:0",), (Hosted("a"),)), Unit(("host:1",), (Hosted("b"),))))
TOGETHER = Placement((Unit(("host:0",), (Hosted("a"), Hosted("b"))), Unit(("host:1",))))


def busy(name: str, rate_rps: float) -> ModelSpec:
    """Returns a model with steps of about 0.3 s for its size."""
    load = ExpectedLoad(rate_rps, 30.0, 10.0)
    return spec(name, expected=load, slo_ttft_s=2.0, slo_tpot_s=0.5)


def measured(policy: str, *models: ModelSpec, target: Placement | None = None) -> SearchInput:
    """Returns the input of a search on two devices, which have measured slow steps."""
    state = make_state(*models, policy=policy)
    speeds = [ModelReport(m.name, "active", prefill_tokens_per_s=100.0, step_s=0.1) for m in models]
    seen(state, report("host:0", *speeds), report("host:1"))
    view = replace(build_view(state, state.now_s()), target=target)
    return SearchInput(state.config, view)


def searching() -> list[psutil.Process]:
    """Returns the processes of `hung` searches."""
    return [child for child in psutil.Process().children() if "sleep" in child.cmdline()]


def homes(placement: Placement, *models: str) -> list[set[str]]:
    """Returns the devices of each model."""
    return [{d for unit in placement.homes(m) for d in unit.devices} for m in models]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
async def test_busy_models_are_placed_apart(policy: str) -> None:
    """Searches in a process. One device can serve either model in time, but not both."""
    given = measured(policy, busy("a", 1.0), busy("b", 1.0))
    found = await simulated_search.search(given)
    assert found == found_by(given), "the same requests are drawn"
    assert not found.refused
    assert found.score > 0.9
    [a, b] = homes(found, "a", "b")
    assert a | b == {"host:0", "host:1"}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_placement_is_replaced_by_a_better_one(policy: str) -> None:
    models = busy("a", 1.0), busy("b", 1.0)
    found = found_by(measured(policy, *models, target=TOGETHER))
    assert found.units != TOGETHER.units
    again = found_by(measured(policy, *models, target=replace(found, score=0.5)))
    assert again == found, "the present one stays, with its new estimate"


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
async def test_models_are_served_where_the_search_has_placed_them(
    cluster: Cluster, policy: str
) -> None:
    cluster.configure(spec("a"), rooms=(2.0,), engines=3, policy=policy)
    await cluster.start()
    await cluster.serves("a")
    cluster.reload(spec("a"), spec("b"))
    await cluster.serves("b", timeout_s=120.0)


@pytest.mark.slow
async def test_the_scheduler_answers_and_stops_during_a_search(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hung = tmp_path / "hung"
    hung.write_text("#!/bin/sh\nexec sleep 600\n")
    hung.chmod(0o700)
    monkeypatch.setattr(simulated_search.sys, "executable", str(hung))
    watchdog = LoopWatchdog()
    monkeypatch.setattr("prism.cluster.main.LoopWatchdog", lambda: watchdog)
    cluster.configure(spec("a"), rooms=(2.0,), policy="seallm")
    cluster.start_scheduler()
    await cluster.start_agent("host:0")
    [process] = await eventually(searching)
    watchdog.all_resumed()
    await eventually(watchdog.all_resumed)
    assert (await cluster.command("status")).ok
    assert not cluster.orders()
    await cluster.stop_scheduler()
    assert not process.is_running()


async def test_a_failed_search_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_search.sys, "executable", "/bin/false")
    with pytest.raises(PlacementSearchError, match="search of seallm ended with status 1"):
        await simulated_search.search(measured("seallm", busy("a", 1.0)))


# --- intervals (SeaLLM §4.3) ----------------------------------------------------------------


def interval_of(state: SchedulerState, estimated: float | None) -> SearchInterval:
    """Begins an interval on a device whose agent has served 1,000 requests before."""
    interval = SearchInterval(state)
    ends(state, 1000, 0)
    interval.begins(estimated)
    return interval


def ends(state: SchedulerState, finished: int, met: int, failed: int = 0) -> None:
    """Reports the totals of an agent."""
    totals = {"finished_total": finished, "met_total": met, "failed_total": failed}
    state.attainment.observe("host:0", [ModelReport("a", "active", **totals)])


@pytest.mark.parametrize(
    ("estimated", "met", "seconds"), [(0.9, 18, 330.0), (0.9, 10, 270.0), (None, 10, 300.0)]
)
def test_the_interval_follows_the_error_of_the_estimate(
    estimated: float | None, met: int, seconds: float
) -> None:
    state = make_state(policy="seallm")
    interval = interval_of(state, estimated)
    assert interval.seconds == 300.0
    ends(state, 1018, met, failed=2)
    assert interval.ended()
    assert interval.seconds == pytest.approx(seconds)


def test_an_interval_with_little_traffic_is_left_out() -> None:
    state = make_state(policy="seallm")
    interval = interval_of(state, 1.0)
    ends(state, 1019, 0)
    assert not interval.ended()
    ends(state, 1038, 0)
    assert not interval.ended(), "each interval counts its own requests"
    assert interval.seconds == 300.0


def test_counters_that_fell_have_restarted_at_zero() -> None:
    state = make_state(policy="seallm")
    interval = interval_of(state, 1.0)
    ends(state, 1010, 5)
    ends(state, 10, 5)
    assert (state.attainment.ended, state.attainment.attainment) == (20, 0.5)
    assert interval.ended()


def test_a_reload_of_the_interval_replaces_the_adapted_one() -> None:
    state = make_state(policy="seallm")
    interval = interval_of(state, 1.0)
    ends(state, 1040, 40)
    assert interval.ended()
    assert interval.seconds == pytest.approx(330.0)
    scheduler = structs.replace(state.config.scheduler, search_interval_s=60.0)
    state.served.serve(structs.replace(state.config, scheduler=scheduler))
    assert interval.seconds == 60.0


@pytest.mark.slow
async def test_attainment_and_interval_are_those_of_agents_reports(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches again after an interval with 20 requests, by the present placement's estimate."""
    given: list[SearchInput] = []

    async def search(one: SearchInput) -> Placement:
        given.append(one)
        return replace(APART, score=0.25 * len(given))

    monkeypatch.setattr("prism.cluster.placement_search.simulated_search", search)
    scheduler = {"search_interval_s": 0.5}
    cluster.configure(spec("a"), spec("b"), rooms=(2.0, 2.0), policy="seallm", scheduler=scheduler)
    await cluster.start()
    await eventually(lambda: cluster.active() == {"host:0": {"a"}, "host:1": {"b"}})
    await asyncio.sleep(1.0)
    assert len(given) == 1, "there is no traffic"
    for _ in range(20):
        await cluster.send("a")
    await eventually(lambda: len(given) == 2)
    assert given[0].view.target is None
    assert given[1].view.target == replace(APART, score=0.25)
