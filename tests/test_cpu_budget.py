"""Calls that end once they have used their CPU time, wherever they are."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from prism import cpu_budget
from prism.cpu_budget import CpuBudget

# Without an interruption this takes longer than any test may.
BACKTRACKS = (r"(a|a)*b", "a" * 100)


def spin() -> None:
    while True:
        pass


def swallow() -> None:
    """Returns where its own handler gets the interruption."""
    try:
        spin()
    except Exception:  # noqa: BLE001 - as parsers do
        return


def test_a_call_that_backtracks_for_ever_ends() -> None:
    with pytest.raises(TimeoutError, match="CPU time"):
        CpuBudget(0.02, 0.02).call(re.match, *BACKTRACKS)


@pytest.mark.parametrize("endless", [spin, swallow])
def test_an_endless_call_ends_and_the_next_one_is_not_made(endless: object) -> None:
    budget = CpuBudget(0.02, 0.02)
    for called in (endless, lambda: pytest.fail("was called")):
        with pytest.raises(TimeoutError):
            budget.call(called)  # type: ignore[arg-type]
    budget.add(0.02)
    assert budget.call(len, "abc") == 3


def test_what_was_added_is_bounded() -> None:
    budget = CpuBudget(0.0, 0.02)
    budget.add(1e9)
    with pytest.raises(TimeoutError):
        budget.call(spin)


def test_the_rest_of_a_budget_ends_a_call_too() -> None:
    with pytest.raises(TimeoutError):
        CpuBudget(1e-9, 1.0).call(spin)


def test_errors_of_the_call_come_through_and_the_timer_stops() -> None:
    with pytest.raises(ZeroDivisionError):
        CpuBudget(1.0, 1.0).call(lambda: 1 // 0)
    while signal.getitimer(signal.ITIMER_PROF) != (0.0, 0.0):
        pass
    assert CpuBudget(1.0, 1.0).call(len, "abc") == 3


def test_calls_share_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsers are called for each character of an answer."""
    started: list[int] = []
    start = cpu_budget._Watch.start

    def counted(self: cpu_budget._Watch) -> None:
        started.append(1)
        start(self)

    monkeypatch.setattr(cpu_budget._Watch, "start", counted)
    budget = CpuBudget(1.0, 1.0)
    began_s = time.process_time()
    for _ in range(10_000):
        budget.call(len, "abc")
    assert len(started) <= 2 + (time.process_time() - began_s) / 0.005


def test_other_threads_take_none_of_it() -> None:
    stop = threading.Event()
    busy = threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)])
    busy.start()
    try:
        CpuBudget(0.02, 0.02).call(time.sleep, 0.2)
    finally:
        stop.set()
        busy.join()


async def test_calls_of_a_thread_are_made_and_ended_on_the_loop() -> None:
    loop = asyncio.get_running_loop()
    turns: list[int] = []

    async def count() -> None:
        while True:
            turns.append(len(turns))
            await asyncio.sleep(0)

    def work() -> None:
        for _ in range(3):
            budget = CpuBudget(0.02, 0.02, loop)
            assert budget.call(threading.current_thread) is threading.main_thread()
            before = len(turns)
            with pytest.raises(TimeoutError):
                budget.call(re.match, *BACKTRACKS)
            assert len(turns) > before

    counting = asyncio.create_task(count())
    await asyncio.to_thread(work)
    counting.cancel()


def test_a_timer_that_ticks_does_not_kill_a_process_that_ends() -> None:
    made = "from prism.cpu_budget import CpuBudget; CpuBudget(9.0, 9.0).call(len, '')"
    ends = "import atexit; atexit.register(lambda: [None for _ in range(3_000_000)])"
    for code in (f"{made}; {ends}", f"{ends}; {made}"):
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
