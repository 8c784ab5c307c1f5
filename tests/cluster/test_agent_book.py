"""Which agents a cluster waits for before it is ready the first time."""

from __future__ import annotations

from prism.cluster.agents import AgentBook
from prism.messages.agent import AgentReport

GRACE_S = 30.0
MAX_S = 90.0


def report(device: str, starting: int = 0) -> AgentReport:
    return AgentReport(
        device=device,
        epoch=1,
        time_unix_s=0.0,
        capacity_bytes=1 << 26,
        page_bytes=1 << 16,
        reserved_bytes=0,
        committed_bytes=0,
        resident_bytes=0,
        engines_free=1,
        engines_starting=starting,
        engines_total=1,
        models=[],
    )


def book() -> AgentBook:
    return AgentBook(["host:0", "host:1"], 0.0, GRACE_S, MAX_S)


def test_an_agent_that_reported_and_died_is_waited_for_as_long_as_one_that_never_did() -> None:
    agents = book()
    agents.take(report("host:0"), 1.0)
    agents.take(report("host:1", starting=1), 20.0)
    agents.drop("host:1")
    assert agents.is_gone("host:1", 21.0)
    assert not agents.all_started(GRACE_S + 19)
    assert agents.all_started(GRACE_S + 20)


def test_engines_that_start_for_too_long_are_not_waited_for() -> None:
    agents = book()
    agents.take(report("host:0"), 1.0)
    for now_s in range(1, int(MAX_S)):
        agents.take(report("host:1", starting=1), float(now_s))
        assert not agents.all_started(float(now_s))
    assert agents.all_started(MAX_S)
    assert agents.not_up() == ["host:1"]


def test_an_agent_that_is_never_heard_is_waited_for_until_the_grace_ends() -> None:
    agents = book()
    agents.take(report("host:0"), 1.0)
    assert not agents.all_started(GRACE_S - 1)
    assert agents.all_started(GRACE_S)
