"""Step control: engines run only the steps that the policy names."""

from __future__ import annotations

import dataclasses

import pytest

from prism.policies import registry
from prism.policies.multiplexing.steps import (
    DeviceStepView,
    Phase,
    StepChoice,
    StepControl,
    StepJob,
    StepRequest,
)
from prism.policies.placement import Hosted, Placement, Unit
from prism_sim.cluster.world import World
from prism_sim.core.records import Records
from prism_sim.core.setup import ClusterSetup, EngineSettings
from tests.sim.clusters import cluster, model, request, work

TARGET = Placement((Unit(("gpu:0",), (Hosted("a"), Hosted("b"))),))
PLAIN = EngineSettings(max_running=16, prefill_chunk_tokens=512)
Log = list[tuple[float, str, Phase, tuple[str, ...]]]


class Script:
    """One job at a time; `order` picks the next of (model, phase, request)."""

    def __init__(self, newest_first: bool = False, batch: int = 99, holds_s: float = 0.0) -> None:
        self.newest_first, self.batch, self.holds_s = newest_first, batch, holds_s
        self.log: Log = []
        self.seen: dict[str, list[StepRequest]] = {}

    def control(self) -> StepControl:
        return StepControl(start=lambda view: None, choose=lambda view, state: (self(view), None))

    def __call__(self, view: DeviceStepView) -> StepChoice:
        assert view.sm_free == (0.0 if any(e.busy for e in view.engines) else 1.0)
        for engine in view.engines:
            for one in (*engine.prefill, *engine.decode):
                self.seen.setdefault(one.id, []).append(one)
        if any(engine.busy for engine in view.engines):
            return StepChoice((), float("inf"))
        ready = [
            (one.arrival_s, one.id, engine.model, phase)
            for engine in view.engines
            for phase, many in ((Phase.PREFILL, engine.prefill), (Phase.DECODE, engine.decode))
            for one in many
        ]
        if not ready:
            return StepChoice((), float("inf"))
        ready.sort(reverse=self.newest_first)
        _, _, name, phase = ready[0]
        ids = tuple(i for _, i, m, p in ready if (m, p) == (name, phase))[: self.batch]
        self.log.append((view.now_s, name, phase, ids))
        return StepChoice((StepJob(name, phase, ids),), self.holds_s)


def run(
    script: Script, *requests: tuple[float, str, int, int], engine: EngineSettings = PLAIN
) -> Records:
    setup = cluster([model(0, "a"), model(1, "b")], engine=engine)
    policy = dataclasses.replace(
        registry.get("alpaserve"), steps=script.control(), search=lambda problem: TARGET
    )
    trace = [request(*one) for one in requests]
    return World(setup, work(setup, trace), policy).run()


def test_jobs_run_one_after_another_as_named() -> None:
    script = Script()
    records = run(script, (0.0, "a", 100, 3), (0.0, "b", 100, 2))
    kinds = [(name, phase) for _, name, phase, _ in script.log]
    prefill, decode = Phase.PREFILL, Phase.DECODE
    assert kinds == [("a", prefill), ("a", decode), ("a", decode), ("b", prefill), ("b", decode)]
    times_s = [0.0, 0.01, 0.01 + 0.0101, 0.01 + 0.0101 + 0.010101]
    assert [time_s for time_s, *_ in script.log[:4]] == pytest.approx(times_s)
    assert records.end_s[0] == pytest.approx(times_s[-1])
    assert not records.errors


def test_requests_left_out_of_a_decode_are_parked_and_come_back() -> None:
    script = Script(batch=1)
    records = run(script, (0.0, "a", 100, 3), (0.0, "a", 100, 3))
    ids = [i for *_, i in script.log]
    assert ids == [("0",), ("0",), ("0",), ("1",), ("1",), ("1",)]
    assert not records.errors


def test_a_newer_request_preempts_at_the_next_step() -> None:
    script = Script(newest_first=True)
    records = run(script, (0.0, "a", 100, 9), (0.025, "b", 100, 2))
    names = [name for _, name, *_ in script.log]
    assert names.index("b") == 3
    assert names[3:5] == ["b", "b"]
    assert records.end_s[1] < records.end_s[0]


@pytest.mark.parametrize("holds_s", [0.05, 1000.0])
def test_what_holds_is_not_asked_again(holds_s: float) -> None:
    asked, held = Script(), Script(holds_s=holds_s)
    trace = ((0.0, "a", 100, 50), (0.105, "b", 100, 10))
    first, second = run(asked, *trace), run(held, *trace)
    assert first.end_s.tolist() == pytest.approx(second.end_s.tolist())
    assert len(held.log) < len(asked.log)


class BothPhases(Script):
    """One job of each phase at a time."""

    def __call__(self, view: DeviceStepView) -> StepChoice:
        jobs = [
            StepJob(engine.model, phase, tuple(one.id for one in many))
            for engine in view.engines
            for phase, many in ((Phase.PREFILL, engine.prefill), (Phase.DECODE, engine.decode))
            if many and phase not in engine.busy
        ]
        return StepChoice(tuple(jobs), self.holds_s)


@pytest.mark.parametrize("holds_s", [0.0, 1000.0])
def test_an_engine_with_serial_phases_computes_one_step_at_a_time(holds_s: float) -> None:
    trace = ((0.0, "a", 100, 9), (0.025, "a", 100, 2))
    engine = dataclasses.replace(PLAIN, serial_phases=True)
    records = run(BothPhases(holds_s=holds_s), *trace, engine=engine)
    step_s = 0.0101
    # The second prompt starts after the second decode step, and the other steps after it.
    assert records.first_s[1] == pytest.approx(0.01 + 2 * step_s + 0.01, abs=1e-4)
    assert records.end_s[0] == pytest.approx(0.02 + 8 * step_s, abs=2e-3)
    together = run(BothPhases(holds_s=holds_s), *trace)
    assert together.first_s[1] < records.first_s[1]
    assert together.end_s[0] < records.end_s[0]


def test_executed_and_waiting_times_are_counted() -> None:
    script = Script(newest_first=True)
    run(script, (0.0, "a", 100, 3), (0.005, "b", 100, 2))
    last = script.seen["0"][-1]
    # its prefill of 10 ms and its first decode step; b's prefill and step came between
    assert last.executed_s == pytest.approx(0.01 + 0.0101)
    waits_s = [one.waiting_s for one in script.seen["0"]]
    assert max(waits_s) == pytest.approx(0.01 + 0.0101, abs=1e-3)


@pytest.mark.parametrize("policy", ["muxserve", "alpaserve"])
def test_the_papers_controls_serve_all(policy: str) -> None:
    setup: ClusterSetup = cluster([model(0, "a"), model(1, "b")], policy=policy)
    trace = [request(0.1 * i, "ab"[i % 2], 100 + i, 10 + i) for i in range(40)]
    world = World(setup, work(setup, trace), target=TARGET)
    records = world.run()
    assert not records.errors
    assert records.ended == 40


def _greedy(view: DeviceStepView, state: None) -> tuple[StepChoice, None]:
    """Prefills waiting requests, whether there is memory or not; decodes when none waits."""
    if any(engine.busy for engine in view.engines):
        return StepChoice(()), None
    for phase in (Phase.PREFILL, Phase.DECODE):
        for engine in view.engines:
            requests = engine.prefill[:1] if phase is Phase.PREFILL else engine.decode
            if requests:
                job = StepJob(engine.model, phase, tuple(r.id for r in requests))
                return StepChoice((job,)), None
    return StepChoice(()), None


def test_a_prefill_that_finds_no_memory_lets_others_run() -> None:
    """Controls count tokens, and the ledger grants whole quanta. A prefill that a control names may
    therefore find no memory; it must not stop the decodes that free memory."""
    setup = cluster([model(0, "a"), model(1, "b")])
    control = StepControl(start=lambda view: None, choose=_greedy)
    policy = dataclasses.replace(
        registry.get("alpaserve"), steps=control, search=lambda problem: TARGET
    )
    trace = [request(0.0, name, 2000, 10) for name in "ab" for _ in range(12)]
    records = World(setup, work(setup, trace), policy).run()
    assert (records.ended, records.errors) == (24, {})


def test_devices_of_one_processor_do_not_hold_each_others_compute() -> None:
    """Serves a request on each of two host devices. A device is not asked again when a job of the
    other ends, so it would wait for the next request."""
    setup = cluster([model(0, "a"), model(1, "b")], gpus=2, policy="muxserve")
    devices = tuple(dataclasses.replace(d, processor="host") for d in setup.devices)
    setup = dataclasses.replace(setup, devices=devices)
    units = (Unit(("gpu:0",), (Hosted("a"),)), Unit(("gpu:1",), (Hosted("b"),)))
    requests = work(setup, [request(10.0, "a"), request(10.001, "b")])
    records = World(setup, requests, target=Placement(units)).run()
    assert not records.errors
    assert max(records.first_s) < 11
