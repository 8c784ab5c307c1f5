"""Policies with a placement search in a cluster of scripted agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from threading import Event

import pytest

from prism.cluster import placement_search
from prism.errors import PlacementSearchError
from prism.messages.model_spec import ExpectedLoad
from prism.policies import registry
from prism.policies.placement import Hosted, Placement, Problem, Unit
from tests.cluster.conftest import Cluster, spec
from tests.cluster.scripted import eventually

pytestmark = pytest.mark.slow


class Searches:
    """Placement search of muxserve++ that can be held up. `problems` has the inputs."""

    def __init__(self) -> None:
        self._find = registry.get("muxserve++").search
        self.problems: list[Problem] = []
        self.failures = 0  # number of first searches that fail
        self.may_end = Event()
        self.may_end.set()

    def __call__(self, problem: Problem) -> Placement:
        assert self._find is not None
        self.problems.append(problem)
        if len(self.problems) <= self.failures:
            raise PlacementSearchError("the process was killed")
        assert self.may_end.wait(30)
        return self._find(problem)

    def rates(self) -> dict[str, float]:
        return {model.name: model.rate_rps for model in self.problems[-1].models}


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Searches:
    found = Searches()
    policy = replace(registry.get("muxserve++"), search=found)
    monkeypatch.setattr("prism.cluster.main.live_policy", lambda _: policy)
    return found


def expecting(name: str, rate: float) -> object:
    return spec(name, expected=ExpectedLoad(rate, 30.0, 10.0))


def homes(cluster: Cluster, count: int) -> Callable[[], bool]:
    return lambda: sum(len(models) for models in cluster.active().values()) == count


async def test_models_are_placed_by_their_expected_traffic(
    cluster: Cluster, searches: Searches
) -> None:
    """Gives the busy models a device each, in whatever order they are."""
    rates = {"a": 9e9, "b": 9e9, "c": 1e-3, "d": 1e-3}
    cluster.configure(*(expecting(n, r) for n, r in rates.items()), rooms=(3.0, 3.0), engines=3)
    await cluster.start()
    await eventually(homes(cluster, 4))
    placed = [sorted(models & {"a", "b"}) for models in cluster.active().values()]
    assert sorted(placed) == [["a"], ["b"]]
    assert searches.rates() == rates
    assert len(searches.problems) == 1


async def test_models_get_the_parts_of_the_sms_that_the_placement_gives(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = Unit(("host:0",), (Hosted("a", sm_share=0.25), Hosted("b", sm_share=0.6)))
    policy = replace(registry.get("muxserve"), search=lambda problem: Placement((unit,)))
    monkeypatch.setattr("prism.cluster.main.live_policy", lambda _: policy)
    cluster.configure(spec("a"), spec("b"), rooms=(3.0,), engines=3)
    await cluster.start()
    await eventually(homes(cluster, 2))
    residents = cluster.agents["host:0"].residents
    assert {name: each.sm_share for name, each in residents.items()} == {"a": 0.25, "b": 0.6}


async def test_nothing_is_planned_until_the_first_search_has_ended(
    cluster: Cluster, searches: Searches
) -> None:
    searches.may_end.clear()
    cluster.configure(spec("a"), rooms=(2.0,))
    cluster.start_scheduler()
    await cluster.start_agent("host:0")
    await eventually(lambda: bool(searches.problems))
    answered = await cluster.command("status")
    assert answered.ok, "the scheduler answers during a search"
    assert not cluster.orders()
    assert not await cluster.ready()
    searches.may_end.set()
    await eventually(cluster.ready)
    await cluster.serves("a")


async def test_a_failed_search_is_repeated(
    cluster: Cluster, searches: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_search, "RETRY_S", 0.1)
    searches.failures = 2
    cluster.configure(spec("a"), rooms=(2.0,))
    await cluster.start()
    await eventually(homes(cluster, 1))
    assert len(searches.problems) == 3
    await cluster.serves("a")


async def test_it_searches_again_by_what_it_has_measured(
    cluster: Cluster, searches: Searches
) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(2.0, 2.0), scheduler={"search_interval_s": 1.0})
    await cluster.start()
    await eventually(homes(cluster, 2))

    async def is_measured() -> bool:
        # The first counters that the scheduler reads of a frontend are its baseline.
        await cluster.serves("a")
        return searches.rates()["b"] < searches.rates()["a"]

    await eventually(is_measured)
    await eventually(lambda: len(searches.problems) > 3)
    assert searches.problems[-1].present is not None
    assert [kind for kind, _ in cluster.orders()] == ["activate", "activate"], "it stays"


async def test_a_model_that_has_no_place_is_refused_by_name(
    cluster: Cluster, searches: Searches
) -> None:
    cluster.configure(spec("a"), spec("b"), spec("c"), rooms=(2.0,), engines=4)
    await cluster.start()
    await eventually(homes(cluster, 2))
    status = await cluster.status()
    [reason] = status.refusals.values()
    assert "left after the models placed before it" in reason


async def test_a_lost_device_and_a_new_model_are_placed_anew(
    cluster: Cluster, searches: Searches
) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(2.0, 2.0))
    await cluster.start()
    await eventually(homes(cluster, 2))
    assert all(len(models) == 1 for models in cluster.active().values())
    await cluster.kill_agent("host:1")
    await eventually(lambda: cluster.active() == {"host:0": {"a", "b"}})
    await cluster.serves("b")
    await cluster.start_agent("host:1")
    cluster.reload(*cluster.config.models, spec("c"))
    await eventually(lambda: "c" in cluster.active()["host:1"])
    await cluster.serves("c")


async def test_models_leave_a_drained_device(cluster: Cluster, searches: Searches) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(3.0, 3.0), engines=3)
    await cluster.start()
    await eventually(homes(cluster, 2))
    assert (await cluster.command("drain", device="host:1")).ok
    await eventually(lambda: cluster.active() == {"host:0": {"a", "b"}, "host:1": set()})
    await cluster.serves("b")


async def test_a_new_scheduler_keeps_the_placement(cluster: Cluster, searches: Searches) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(3.0, 3.0), engines=3)
    await cluster.start()
    await eventually(homes(cluster, 2))
    before, number = cluster.orders(), len(searches.problems)
    await cluster.stop_scheduler()
    cluster.start_scheduler()
    await cluster.serves("a")
    await asyncio.sleep(1.0)
    assert cluster.orders() == before
    assert len(searches.problems) == number, "the traffic of the first search is not known any more"
