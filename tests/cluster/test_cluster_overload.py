"""Models that the policy gives up under overload, with scripted agents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from prism.cluster.state.actions import Actions
from prism.cluster.state.activation_history import Activations
from prism.messages.cluster import ClusterStatus
from prism.policies.data import Action, ClusterView, ModelView, Refuse, Settings
from prism.scheduler import traffic
from prism.scheduler.decision_journal import MemoryJournal, Refused
from tests.cluster import conftest
from tests.cluster.conftest import TIMING, Cluster, spec
from tests.cluster.scripted import eventually
from tests.policies import giving_up

GiveUp = Callable[..., None]


@pytest.fixture
def views() -> list[ClusterView]:
    """Views that the policy planned on."""
    return []


@pytest.fixture
def give_up(views: list[ClusterView], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GiveUp:
    """Returns a function that sets the models to give up."""
    path = tmp_path / "given-up"
    monkeypatch.setenv(giving_up.FILE, str(path))

    def plan(view: ClusterView, settings: Settings) -> tuple[Action, ...]:
        views.append(view)
        return giving_up.plan(view, settings)

    policy = replace(giving_up.POLICY, plan=plan)
    monkeypatch.setattr("prism.cluster.main.live_policy", lambda _: policy)

    def name(*models: str) -> None:
        path.write_text(" ".join(models))

    return name


def last(views: list[ClusterView], name: str) -> ModelView:
    return next(model for model in views[-1].models if model.name == name)


@pytest.mark.slow
async def test_a_model_is_given_up_and_comes_back(
    cluster: Cluster, views: list[ClusterView], give_up: GiveUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stays given up across a restart of the scheduler."""
    monkeypatch.setattr(traffic, "SLOT_S", 0.2)
    cluster.configure(spec("a"), spec("b"), rooms=(2.0,))
    await cluster.start()
    await cluster.serves("a")

    async def seen(holds: Callable[[ClusterStatus], bool]) -> bool:
        return holds(await cluster.status())

    give_up("a")
    await eventually(lambda: seen(lambda status: status.overload == ["a"]))
    status = await cluster.status()
    assert status.refusals == {"a": giving_up.REASON}
    assert status.degraded == {"a": f"requests are rejected: {giving_up.REASON}"}
    assert cluster.active() == {"host:0": {"b"}}
    await eventually(lambda: last(views, "a").deferred)
    assert not last(views, "a").wanted
    # The end of the eviction does not end the refusal.
    await eventually(lambda: last(views, "a").state == "absent")
    states = [m for view in views for m in view.models if m.name == "a"]
    left = max(n for n, model in enumerate(states) if model.state == "draining")
    assert all(model.deferred for model in states[left + 1 :])
    assert await cluster.send("a") == "unplaced"
    # Frontends reject its requests. They count although no agent ever sees them.
    before = last(views, "a").traffic.requests
    for _ in range(7):
        await cluster.count_arrival("a")
    await eventually(lambda: last(views, "a").traffic.requests >= before + 7)

    await cluster.stop_scheduler()
    assert (await cluster.status()).overload == ["a"]
    views.clear()
    cluster.start_scheduler()
    await eventually(lambda: views and last(views, "a").deferred)
    assert (await cluster.status()).overload == ["a"]
    await cluster.serves("b")
    assert cluster.active() == {"host:0": {"b"}}

    served = cluster.finished("a")
    give_up()
    await eventually(lambda: cluster.finished("a") == served + 1)
    await eventually(lambda: seen(lambda status: not (status.overload or status.refusals)))
    assert (await cluster.status()).actions_total["refuse"] == 1
    assert not last(views, "a").deferred


@pytest.mark.slow
async def test_a_request_counts_once_although_it_waits_for_its_model(
    cluster: Cluster, views: list[ClusterView], give_up: GiveUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts when it arrives, not again when an agent has it."""
    monkeypatch.setattr(traffic, "SLOT_S", 0.2)
    give_up("a")
    cluster.configure(spec("a"), spec("b"), rooms=(2.0,))
    await cluster.start()
    await cluster.count_arrival("a")  # baseline of the frontend
    await eventually(lambda: len(views) > 20)
    for _ in range(5):
        assert await cluster.send("a") == "unplaced"
    await eventually(lambda: last(views, "a").traffic.requests == 5)
    give_up()
    await eventually(lambda: cluster.finished("a") == 5)
    seen = len(views)
    await eventually(lambda: len(views) > seen + 20)
    assert {last(views[: n + 1], "a").traffic.requests for n in range(seen, len(views))} == {5}


@pytest.mark.slow
async def test_an_eviction_by_the_policy_waits_for_what_runs(
    cluster: Cluster, give_up: GiveUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests run for longer than engine.drain_timeout, which ends an operator's eviction."""
    monkeypatch.setattr(conftest, "TIMING", replace(TIMING, eviction_slack_s=0.0))
    cluster.configure(spec("a"), rooms=(2.0,))
    await cluster.start()
    agent = cluster.agents["host:0"]
    agent.delay_s = 2 * cluster.config.engine.drain_timeout_s
    give_up("a")
    await eventually(lambda: agent.orders[-1] == ("evict", "a"))
    await eventually(lambda: not agent.residents)
    give_up()
    await cluster.serves("a")
    status = await cluster.status()
    assert "evict_failed" not in status.actions_total
    answer = await cluster.command("evict", model="a")
    assert "did not answer within 1 s" in answer.message


def test_only_the_begin_of_an_overload_is_new() -> None:
    known = Activations(TIMING, 0.0)
    assert known.refuse("a", "1 byte is missing")
    assert not known.refuse("a", "1 byte is missing")
    assert known.refuse("a", "overload: 1.0 requests/s", overload=True)
    assert not known.refuse("a", "overload: 2.0 requests/s", overload=True)
    assert (known.refusals, known.overload) == ({"a": "overload: 2.0 requests/s"}, {"a"})
    assert known.refuse("a", "1 byte is missing")
    assert not known.overload
    known.refuse("a", "overload", overload=True)
    known.keep_refusals({"b"})
    assert (known.refusals, known.overload) == ({}, set())
    known.refuse("a", "overload", overload=True)
    known.clear("a")
    assert not known.overload


def test_the_journal_says_which_refusals_are_for_overload() -> None:
    journal = MemoryJournal()
    actions = Actions(lambda: 3.0, journal)
    actions.refuse(Refuse("a", "why", overload=True))
    actions.refuse(Refuse("b", "full"))
    assert journal.records == [
        Refused(time_s=3.0, model="a", reason="why", overload=True),
        Refused(time_s=3.0, model="b", reason="full"),
    ]
