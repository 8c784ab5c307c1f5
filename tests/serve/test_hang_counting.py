"""Counting of hangs in a supervisor. The test scripts the time and the part."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from prism import process
from prism.process import HEARTBEAT_VARIABLE, Heartbeat, LoopWatchdog, beat
from prism.serve.processes.supervisor import ClusterFailedError, Supervisor, Watched


class Scripted:
    """A part in memory: it ends as soon as it is killed."""

    name = "scripted"

    def __init__(self) -> None:
        self.code: int | None = None
        self.count, self.kills = 0, 0

    def start(self) -> None:
        self.code, self.count = None, 0

    def exit_code(self) -> int | None:
        return self.code

    def beats(self) -> int:
        return self.count

    def end_at_once(self) -> None:
        self.kills += 1
        self.code = -signal.SIGKILL

    def tail(self, lines: int) -> list[str]:
        return []


def scripted(part: Scripted, hang_s: float) -> tuple[Supervisor, list[str]]:
    said: list[str] = []
    supervisor = Supervisor([], None, said.append, hang_s)
    supervisor._watched = [Watched(part)]
    return supervisor, said


def watch(supervisor: Supervisor, until_s: float) -> None:
    for look in range(int(until_s * 5)):
        supervisor.watch(look / 5)


def test_the_time_in_which_a_part_hangs_is_no_peace() -> None:
    part = Scripted()
    supervisor, said = scripted(part, hang_s=90)
    supervisor.settled = True
    reports, now_s = set(), 0.0
    while part.kills < 5:  # it beats for a second, then hangs
        part.count += part.count < 5
        supervisor.watch(now_s)
        now_s += 0.2
        if part.kills == 4 and part.code is None:
            reports.add(supervisor.troubles.get("scripted"))
    assert reports == {"ended 4 times in a row (last: did not answer for 90 s)"}
    assert [line.rpartition("restarting in ")[2] for line in said[1::2]] == [
        "0.5 s",
        "1 s",
        "2 s",
        "4 s",
    ]


def test_one_that_hangs_each_time_it_starts_ends_a_cluster_that_was_never_ready() -> None:
    supervisor, _ = scripted(Scripted(), hang_s=5)
    with pytest.raises(ClusterFailedError, match=r"keeps ending \(did not answer for 300 s"):
        watch(supervisor, 2500)


def test_a_part_that_outlives_its_kill_is_killed_once_and_reported() -> None:
    part = Scripted()
    part.count, part.end_at_once = 1, lambda: None  # type: ignore[method-assign]
    supervisor, said = scripted(part, hang_s=5)
    watch(supervisor, 20)
    assert said == ["scripted did not answer for 5 s and was killed"]
    assert supervisor.troubles == {
        "scripted": "did not answer for 5 s; killed, but has not ended yet"
    }


async def steady() -> None:
    while True:
        await asyncio.sleep(0)


async def stuck(until: asyncio.Event) -> None:
    await until.wait()
    await steady()


async def eventually(watchdog: LoopWatchdog) -> None:
    while not watchdog.all_resumed():
        await asyncio.sleep(0)


async def test_a_process_beats_while_each_of_its_loops_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "HEARTBEAT_S", 0.001)
    heartbeat, watchdog, going_on = Heartbeat(), LoopWatchdog(), asyncio.Event()
    monkeypatch.setenv(HEARTBEAT_VARIABLE, str(heartbeat.fd))
    loops = [watchdog.watch(steady()), watchdog.watch(stuck(going_on))]
    tasks = [asyncio.create_task(each) for each in (*loops, beat(watchdog))]
    while "event loops stalled: stuck" not in caplog.text:
        await asyncio.sleep(0.001)
    assert heartbeat.count() <= 1, "only for the first wait of both"
    going_on.set()
    while heartbeat.count() < 5:
        await asyncio.sleep(0.001)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_loop_that_has_ended_is_not_waited_for() -> None:
    watchdog, never = LoopWatchdog(), asyncio.Event()
    tasks = [asyncio.create_task(watchdog.watch(each)) for each in (steady(), stuck(never))]
    await eventually(watchdog)
    for _ in range(10):
        await asyncio.sleep(0)
        assert not watchdog.all_resumed()
    assert watchdog.stalled == ["stuck"]
    tasks[1].cancel()
    await eventually(watchdog)
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_the_wrapper_of_a_program_loads_no_event_loop() -> None:
    code = "import sys, prism.process; sys.exit('asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
