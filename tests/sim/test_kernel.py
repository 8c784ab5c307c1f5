"""Events are ordered by time, then by scheduling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_sim.core.kernel import Alarm, Kernel


@given(st.lists(st.integers(0, 5), max_size=30))
def test_order_is_time_then_sequence(times: list[int]) -> None:
    kernel, seen = Kernel(), list[tuple[int, int]]()
    for number, time in enumerate(times):
        kernel.at(float(time), lambda t, n: seen.append((t, n)), time, number)
    kernel.run()
    assert seen == sorted((time, number) for number, time in enumerate(times))
    assert kernel.events == len(times)


def test_events_may_schedule_events_now() -> None:
    kernel, seen = Kernel(), list[str]()
    kernel.at(1.0, lambda: (seen.append("a"), kernel.after(0.0, seen.append, "c")))
    kernel.at(1.0, seen.append, "b")
    kernel.run()
    assert seen == ["a", "b", "c"]
    assert kernel.now_s() == 1.0


def test_run_stops_before_what_is_later() -> None:
    kernel, seen = Kernel(), list[str]()
    kernel.at(2.0, seen.append, "late")
    kernel.run(until_s=1.0)
    assert seen == []
    kernel.run()
    assert seen == ["late"]


def test_time_never_runs_backwards() -> None:
    kernel = Kernel(start_s=5.0)
    with pytest.raises(AssertionError, match="before now"):
        kernel.at(4.0, print)
    with pytest.raises(AssertionError, match="before now"):
        kernel.after(-1.0, print)


def test_an_alarm_rings_once_at_the_earliest_moment() -> None:
    kernel, rung = Kernel(), list[float]()
    alarm = Alarm(kernel, lambda: rung.append(kernel.time_s))
    alarm.after(5.0)
    alarm.after(2.0)
    alarm.after(3.0)
    kernel.at(4.0, alarm.after, 4.0)
    kernel.run()
    assert rung == [2.0, 8.0]
