"""Engines beyond their lease are replaced: which, when, and never in a loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading

import pytest

import kvcached
from kvcached import DriverMemory, ProcessMemory
from kvcached.errors import SystemCallError
from prism.agent.engines.overdraft import MemoryWatch
from prism.agent.state.device_state import AgentTiming, DeviceState
from prism.agent.state.engine_pool import EnginePool, EngineProcess, EngineState
from prism.agent.state.request_table import TrackedRequest
from prism.messages.gpu_memory import OutsideMemory
from tests.queueing.requests import request

MIB = 1 << 20
SLACK = 8 * MIB
TIMING = AgentTiming(
    drift_s=1.0, overdraft_s=10.0, overdraft_pause_s=60.0, overdraft_pause_max_s=200.0
)
PIDS = {"cuda0-e0": 100, "cuda0-e1": 101, "cuda0-e2": 102}


class Bench:
    """Three engines without processes that leased 10 MiB each, a scripted driver and clock."""

    def __init__(self, *, is_gpu: bool = True) -> None:
        self.time_s = 1000.0
        self.held: dict[int, int | None] = {}
        self.names_of: dict[int, str] = {}
        self.silent = False
        self.asked = 0
        self.replaced: list[tuple[float, str, str]] = []
        self.state = DeviceState(EnginePool("cuda:0", 3), TIMING, lambda: self.time_s)
        for name in PIDS:
            self.fresh(name, EngineState.FREE)
        self.watch = MemoryWatch(
            self.state, self, is_gpu=is_gpu, slack_bytes=SLACK, replace=self.replace
        )  # type: ignore[arg-type]

    name = "cuda:0"

    def fresh(self, name: str, state: EngineState) -> EngineProcess:
        engine = self.state.pool.create(self.time_s)
        engine.become(state, self.time_s)
        engine.pid = PIDS.get(name, 200 + len(self.replaced))
        self.held[engine.pid] = 10 * MIB
        return engine

    def driver_memory(self) -> DriverMemory | None:
        self.asked += 1
        named = tuple(
            ProcessMemory(pid, used, self.names_of.get(pid, "python"))
            for pid, used in self.held.items()
        )
        return None if self.silent else DriverMemory(200 * MIB, 100 * MIB, "nvml", named)

    def usage(self) -> kvcached.DeviceUsage:
        """Returns a ledger in which each engine of the pool has leased 10 MiB."""
        clients = tuple(
            kvcached.ClientUsage(e.id, e.pid, 0, 0, 10 * MIB, 0, None, 0, 0)
            for e in self.state.pool
        )
        static = 10 * MIB * len(clients)
        free = 100 * MIB - static
        return kvcached.DeviceUsage(100 * MIB, 4096, static, 0, static, free, clients)

    def replace(self, engine: EngineProcess, why: str) -> None:
        self.replaced.append((self.time_s, engine.id, why))
        self.state.pool.remove(engine.id)
        del self.held[engine.pid]

    def engine(self, number: int) -> EngineProcess:
        engine = self.state.pool.get(f"cuda0-e{number}")
        assert engine is not None
        return engine

    def hold(self, number: int, size: int | None) -> None:
        self.held[self.engine(number).pid] = size

    def run(self, number: int, count: int) -> None:
        engine = self.engine(number)
        engine.state, engine.model = EngineState.ACTIVE, f"m{number}"
        for index in range(count):
            made = request(f"{number}-{index}", "a", prompt_tokens=4)
            self.state.requests.start(TrackedRequest(made), f"cuda0-e{number}", 16)

    def pass_time(self, seconds: float) -> None:
        until_s = self.time_s + seconds
        while self.time_s < until_s:
            self.time_s += 0.5
            self.tick()

    def tick(self) -> None:
        if self.watch.is_due():
            self.watch.take(self.watch.ask())

    def names(self) -> list[str]:
        return [name for _, name, _ in self.replaced]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_an_engine_beyond_its_lease_is_replaced_after_the_bound(bench: Bench) -> None:
    bench.hold(1, 10 * MIB + SLACK + 1)
    bench.pass_time(9.5)
    assert not bench.replaced
    bench.pass_time(2)
    assert bench.names() == ["cuda0-e1"]
    assert bench.replaced[0][2] == ("it holds 8MiB of cuda:0 beyond its lease, for more than 10 s")


def test_within_the_slack_nothing_happens(bench: Bench) -> None:
    bench.hold(1, 10 * MIB + SLACK)
    bench.pass_time(100)
    assert not bench.replaced


def test_a_moment_beyond_it_is_forgiven(bench: Bench) -> None:
    """Covers brief peaks, as while graphs are captured, or before freed memory is seen."""
    for _ in range(5):
        bench.hold(1, 99 * MIB)
        bench.pass_time(8)
        bench.hold(1, 10 * MIB)
        bench.pass_time(3)
    assert not bench.replaced


def test_idle_engines_go_first_then_the_least_loaded(bench: Bench) -> None:
    bench.run(0, 1)
    bench.run(1, 0)
    for number in range(3):
        bench.hold(number, 99 * MIB)
    bench.pass_time(400)
    assert bench.names() == ["cuda0-e2", "cuda0-e1", "cuda0-e0"]


def test_pauses_between_replacements_double_up_to_a_bound(bench: Bench) -> None:
    """Covers engines of which each successor holds more."""
    bench.hold(0, 99 * MIB)
    for _ in range(2400):
        bench.pass_time(1)
        while bench.state.pool.is_short:
            more = (99 + 10 * len(bench.replaced)) * MIB
            bench.held[bench.fresh("", EngineState.FREE).pid] = more
    times = [time_s for time_s, _, _ in bench.replaced]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert [round(gap / 10) for gap in gaps[:3]] == [6, 12, 20]
    assert all(gap >= 200 for gap in gaps[2:])


def test_what_a_fresh_engine_does_too_is_borne_and_named(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Covers engines that hold too much for as long as they are idle after a model."""
    bench.hold(0, 50 * MIB)
    for _ in range(2000):
        bench.pass_time(5)
        while bench.state.pool.is_short:
            bench.held[bench.fresh("", EngineState.FREE).pid] = 50 * MIB + SLACK
        for engine in bench.state.pool:  # models come and go
            if bench.held[engine.pid] != 10 * MIB:
                hosted = int(bench.time_s) // 60 % 2 == 0
                engine.state = EngineState.DRAINING if hosted else EngineState.FREE
    assert bench.names() == ["cuda0-e0"]
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert errors == [
        "cuda0-e3 (no model) holds 48MiB of cuda:0 beyond its lease, and replacing an engine for"
        " 40MiB did not cure it: raise engine.static; it is not replaced"
    ]


def test_much_more_than_before_and_other_models_are_judged_anew(bench: Bench) -> None:
    bench.hold(0, 50 * MIB)
    bench.pass_time(20)
    bench.hold(1, 50 * MIB + SLACK)
    bench.pass_time(200)
    assert bench.names() == ["cuda0-e0"]
    bench.run(2, 0)
    bench.hold(2, 50 * MIB)
    bench.pass_time(20)
    bench.hold(1, 51 * MIB + SLACK)
    bench.pass_time(200)
    assert bench.names() == ["cuda0-e0", "cuda0-e2", "cuda0-e1"]


def test_the_pause_is_forgotten_after_a_time_without_cause(bench: Bench) -> None:
    for number in (0, 1):
        bench.hold(number, (50 + 10 * number) * MIB)
        bench.pass_time(200)
    bench.hold(2, 70 * MIB)
    bench.pass_time(15)
    assert bench.names() == ["cuda0-e0", "cuda0-e1", "cuda0-e2"]
    assert bench.watch._pause.length_s == 60


@pytest.mark.parametrize(
    "state", [EngineState.STARTING, EngineState.ACTIVATING, EngineState.DRAINING]
)
def test_engines_that_change_are_not_judged(bench: Bench, state: EngineState) -> None:
    bench.hold(1, 99 * MIB)
    bench.engine(1).state = state
    bench.pass_time(100)
    assert not bench.replaced


def test_without_figures_of_the_driver_the_engines_reports_count(bench: Bench) -> None:
    """Covers torch memory that is still reserved for a model that is gone."""
    bench.silent = True
    bench.engine(1).outside = OutsideMemory(
        leased_bytes=10 * MIB, context_bytes=10 * MIB, torch_bytes=SLACK + 1
    )
    bench.pass_time(12)
    assert bench.names() == ["cuda0-e1"]
    assert bench.watch.memory is None


def test_a_rank_elsewhere_that_holds_too_much_replaces_the_engine(bench: Bench) -> None:
    """Covers a rank that this device's driver does not see: it sees rank 0 alone."""
    bench.engine(1).outside = OutsideMemory(
        leased_bytes=10 * MIB, context_bytes=10 * MIB, other_bytes=SLACK + 1, source="process"
    )
    bench.pass_time(12)
    assert bench.names() == ["cuda0-e1"]


def test_the_driver_is_asked_every_interval_and_after_an_eviction(bench: Bench) -> None:
    bench.tick()
    bench.tick()
    assert bench.asked == 1
    bench.watch.check_soon()
    bench.tick()
    assert bench.asked == 2
    bench.pass_time(10)
    assert bench.asked == 12


def test_a_driver_that_refuses_is_logged_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise SystemCallError("NVML: " + ("lost" if bench.time_s > 1050 else "no permission"))

    monkeypatch.setattr(bench, "driver_memory", refuse)
    bench.pass_time(100)
    assert bench.watch.memory is None
    assert [r.getMessage() for r in caplog.records] == [
        "cuda:0: the driver does not report memory usage: NVML: no permission",
        "cuda:0: the driver does not report memory usage: NVML: lost",
    ]


async def test_a_driver_that_blocks_keeps_nobody_waiting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asks it in another thread, once at a time."""
    asked, answer, done = [], threading.Event(), asyncio.Event()
    loop, ask, take = asyncio.get_running_loop(), bench.driver_memory, bench.watch.take

    def blocked() -> DriverMemory | None:
        asked.append(threading.current_thread())
        answer.wait(30)
        return ask()

    def taken(said: object) -> None:
        take(said)  # type: ignore[arg-type]
        assert asyncio.get_running_loop() is loop
        done.set()

    monkeypatch.setattr(bench, "driver_memory", blocked)
    monkeypatch.setattr(bench.watch, "take", taken)
    task = asyncio.create_task(bench.watch.run())
    while not asked:
        await asyncio.sleep(0.01)
    bench.time_s += 60
    bench.watch.check_soon()
    await asyncio.sleep(0.2)
    assert len(asked) == 1
    assert asked[0] is not threading.current_thread()
    answer.set()
    await done.wait()
    assert bench.watch.memory is not None
    task.cancel()


def test_the_report_has_the_drift(bench: Bench) -> None:
    bench.hold(0, 13 * MIB)
    bench.hold(1, 9 * MIB)
    bench.tick()
    assert bench.watch.memory is not None
    assert bench.watch.memory.drift_bytes == 3 * MIB
    bench.hold(0, 99 * MIB)
    bench.pass_time(12)
    assert bench.watch.memory.replaced_total == 1


def test_foreign_processes_are_named_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.held[4711] = 40 * MIB
    with caplog.at_level(logging.WARNING):
        bench.pass_time(60)
    told = [r.getMessage() for r in caplog.records if "4711" in r.getMessage()]
    assert told == [
        "process 4711 (python) holds 40MiB of cuda:0 and does not belong to this cluster: memory"
        " suffices for both"
    ]
    assert not bench.replaced


def test_the_server_of_mps_is_no_stranger(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.held[4711], bench.names_of[4711] = 40 * MIB, "/usr/bin/nvidia-cuda-mps-server"
    with caplog.at_level(logging.WARNING):
        bench.pass_time(60)
    assert not caplog.records
    assert bench.watch.memory is not None
    assert bench.watch.memory.foreign_bytes == 40 * MIB


def test_a_killed_engine_that_is_still_there_is_not_reported(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        bench.held[4711] = 40 * MIB
        bench.pass_time(8)
        del bench.held[4711]
        bench.pass_time(20)
    assert not caplog.records


def test_host_devices_are_not_watched() -> None:
    bench = Bench(is_gpu=False)
    bench.hold(1, 99 * MIB)
    bench.pass_time(100)
    assert (bench.replaced, bench.asked, bench.watch.memory) == ([], 0, None)
