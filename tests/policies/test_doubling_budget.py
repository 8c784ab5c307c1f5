"""SeaLLM's doubling-budget scheduling: Theorem 1 by brute force, Figure 2, budgets, starvation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.papers.ablations import round_robin
from prism.policies.baselines import doubling_budget as db
from prism.policies.baselines import temporal
from prism.policies.baselines.doubling_budget import DbSettings
from prism.policies.multiplexing.steps import (
    DeviceStepView,
    EngineStepView,
    Phase,
    StepChoice,
    StepControl,
    StepRequest,
)
from tests.policies.machine import Machine, Request

PATIENT = DbSettings(starvation_factor=1e9)
LITERAL = DbSettings(starvation_factor=1e9, join=False)
Job = tuple[int, int]
"""(arrival, execution time); the services are the execution times."""


# --- budgets -------------------------------------------------------------------------------


def test_budgets_double_once_used_up() -> None:
    assert [db.left_s(t, 2.0) for t in (0, 1, 2, 3, 6, 13, 14)] == [2, 1, 4, 3, 8, 1, 16]


def test_priority_is_left_budget_times_execution_time() -> None:
    engine = EngineStepView("a", execution_s=3.0, execution_std_s=1.0)
    assert db.priority(StepRequest("r", 0.0, 1, 1, executed_s=1.5), engine) == 2.5 * 3.0
    assert db.priority(StepRequest("r", 0.0, 1, 1, executed_s=4.0), engine) == 8.0 * 3.0


def one(engine: EngineStepView, phase: str, *requests: StepRequest) -> EngineStepView:
    return replace(engine, **{phase: requests})  # type: ignore[arg-type]


SHORT = EngineStepView("short", execution_s=1.0)
LONG = EngineStepView("long", execution_s=4.0)


def chosen(*engines: EngineStepView, kv: int = 1000) -> StepChoice:
    return db.choose(DeviceStepView(0.0, engines, kv), DbSettings())


def names(choice: StepChoice) -> tuple[str, ...]:
    return choice.jobs[0].requests if choice.jobs else ()


def test_a_short_request_preempts_a_long_one_until_that_is_nearly_done() -> None:
    new = one(SHORT, "prefill", StepRequest("s", 9.0, 1, 1))
    begun = one(LONG, "decode", StepRequest("l", 0.0, 1, 1, executed_s=1.0))
    assert names(chosen(new, begun)) == ("s",)
    nearly = one(LONG, "decode", StepRequest("l", 0.0, 1, 1, executed_s=3.9))
    assert names(chosen(new, nearly)) == ("l",)


def test_one_that_exceeds_its_budget_steps_back() -> None:
    over = StepRequest("over", 0.0, 1, 1, executed_s=1.0)
    engine = replace(SHORT, decode=(over,), prefill=(StepRequest("new", 5.0, 1, 1),))
    assert names(chosen(engine)) == ("new",)


def test_batches_have_one_service_and_phase_in_order_of_priority() -> None:
    waiting = tuple(StepRequest(f"w{i}", i, 1, kv_tokens=4) for i in range(3))
    engine = replace(SHORT, prefill=waiting)
    other = one(LONG, "decode", StepRequest("l", 0.0, 1, 1))
    assert names(chosen(engine, other)) == ("w0", "w1", "w2")
    assert names(chosen(engine, other, kv=9)) == ("w0", "w1")
    assert names(chosen(replace(engine, batch_max=1), other)) == ("w0",)
    assert names(chosen(engine, other, kv=3)) == ("l",)  # without memory the next best runs


def test_a_new_request_joins_the_service_that_runs() -> None:
    """Prefills first, although the decode has less left. Without `join` it decodes."""
    new, begun = StepRequest("new", 9.0, 1, 1), StepRequest("old", 0.0, 1, 1, executed_s=0.5)
    engine = replace(LONG, prefill=(new,), decode=(begun,))
    assert names(chosen(engine)) == ("new",)
    assert names(chosen(engine, kv=0)) == ("old",)
    assert names(db.choose(DeviceStepView(0.0, (engine,), 1000), LITERAL)) == ("old",)


def test_nothing_while_a_step_executes() -> None:
    busy = replace(LONG, busy=frozenset({Phase.DECODE}))
    ready = one(SHORT, "prefill", StepRequest("s", 0.0, 1, 1))
    assert chosen(busy, ready) == StepChoice((), math.inf)
    assert chosen(SHORT, LONG) == StepChoice((), math.inf)


def test_a_choice_holds_until_the_budget_ends_or_somebody_starves() -> None:
    running = one(SHORT, "decode", StepRequest("s", 0.0, 1, 1, executed_s=0.25))
    assert chosen(running).holds_s == 0.75
    long = one(SHORT, "decode", StepRequest("s", 0.0, 1, 1, executed_s=7.0))
    assert chosen(long).holds_s == 8.0
    waits = one(LONG, "decode", StepRequest("l", 0.0, 1, 1, waiting_s=19.5))
    assert chosen(running, waits).holds_s == 0.5
    assert chosen(one(SHORT, "prefill", StepRequest("s", 0.0, 1, 1))).holds_s == 0.0
    starved = one(SHORT, "decode", StepRequest("s", 0.0, 1, 1, waiting_s=9.0))
    assert chosen(starved).holds_s == 0.0  # it goes before all others for one step only


def expected_step(view: DeviceStepView) -> tuple[str, ...]:
    """Returns the requests of the next step, with a batch composed for each request in turn."""
    heads: list[tuple[tuple[float, float, float, str], EngineStepView, Phase, StepRequest]] = []
    for engine in view.engines:
        starved_s = db.starvation_s(engine, DbSettings())
        for phase, requests in ((Phase.PREFILL, engine.prefill), (Phase.DECODE, engine.decode)):
            for r in requests:
                rank = (0.0, db.priority(r, engine), r.arrival_s, r.id)
                if r.waiting_s >= starved_s:
                    rank = (-1.0, -r.waiting_s, r.arrival_s, r.id)
                heads.append((rank, engine, phase, r))
    heads.sort(key=lambda head: head[0])
    free = temporal.kv_free_bytes(view)
    for rank, engine, own, first in heads:
        for phase in (own,) if rank[0] < 0 else dict.fromkeys((Phase.PREFILL, own)):
            same = [h[3] for h in heads if h[1] is engine and h[2] is phase]
            same.sort(key=lambda r: r is not first)
            if phase is Phase.DECODE:
                return tuple(r.id for r in same[: engine.batch_max])
            room = max(0, engine.batch_max - len(engine.decode))
            if batch := temporal.fitting(same[:room], engine, free):
                return batch
    return ()


@st.composite
def engines(draw: st.DrawFn, name: str) -> EngineStepView:
    def requests(phase: str) -> tuple[StepRequest, ...]:
        times = st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.0, 20.0, 40.0])
        size = st.integers(1, 9)
        each = st.tuples(times, size, size, times, times)
        many = draw(st.lists(each, max_size=5))
        return tuple(StepRequest(f"{name}{phase}{i}", *fields) for i, fields in enumerate(many))

    execution_s = draw(st.sampled_from([0.5, 1.0, 4.0]))
    batch_max = draw(st.integers(1, 6))
    waiting, running = requests("w"), requests("r")
    return EngineStepView(
        name, waiting, running, execution_s=execution_s, batch_max=batch_max, kv_bytes=len(running)
    )


@given(engines("a"), engines("b"), engines("c"), st.integers(0, 40))
def test_the_first_request_that_can_run_runs_with_its_batch(
    a: EngineStepView, b: EngineStepView, c: EngineStepView, kv: int
) -> None:
    view = DeviceStepView(0.0, (a, b, c), kv)
    assert names(db.choose(view, DbSettings())) == expected_step(view)


# --- Theorem 1 -----------------------------------------------------------------------------


def optimum(jobs: Sequence[Job]) -> Fraction:
    """Returns the least sum of completion / execution time over all preemptive schedules."""

    @cache
    def best(now: int, left: tuple[int, ...]) -> Fraction:
        ready = [i for i, n in enumerate(left) if n and jobs[i][0] <= now]
        if not ready:
            later = [jobs[i][0] for i, n in enumerate(left) if n]
            return best(min(later), left) if later else Fraction(0)
        kinds = {(jobs[i][1], left[i]): i for i in ready}
        return min(
            best(now + 1, (*left[:i], left[i] - 1, *left[i + 1 :]))
            + (Fraction(now + 1, jobs[i][1]) if left[i] == 1 else 0)
            for i in kinds.values()
        )

    return best(0, tuple(size for _, size in jobs))


def scheduled(jobs: Sequence[Job]) -> Fraction:
    """Returns the same sum under the doubling-budget control, one request per step."""
    kinds = {size: EngineStepView(str(size), execution_s=size, batch_max=1) for _, size in jobs}
    left, now, total = [size for _, size in jobs], 0, Fraction(0)
    while any(left):
        engines = tuple(replace(e, decode=_ready(jobs, left, now, s)) for s, e in kinds.items())
        choice = db.choose(DeviceStepView(now, engines, 0), PATIENT)
        now += 1
        for job in choice.jobs:
            i = int(job.requests[0])
            left[i] -= 1
            if not left[i]:
                total += Fraction(now, jobs[i][1])
    return total


def _ready(
    jobs: Sequence[Job], left: Sequence[int], now: int, size: int
) -> tuple[StepRequest, ...]:
    return tuple(
        StepRequest(str(i), at, 0, 0, executed_s=size - left[i])
        for i, (at, own) in enumerate(jobs)
        if own == size and left[i] and at <= now
    )


def two_services() -> Iterator[tuple[Job, ...]]:
    """Yields all sets of up to 4 requests of two services, execution times 1-4, arrivals 0-3."""
    for sizes in itertools.combinations(range(1, 5), 2):
        kinds = list(itertools.product(range(4), sizes))
        for count in range(1, 5):
            yield from itertools.combinations_with_replacement(kinds, count)


def test_theorem_1_on_two_services_and_one_server() -> None:
    """Checks all 2,964 instances: no schedule has a smaller normalised latency."""
    checked = 0
    for jobs in two_services():
        assert scheduled(jobs) == optimum(jobs), jobs
        checked += 1
    assert checked == 2964


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_theorem_1_on_larger_requests(sizes: Job, rows: list[tuple[int, bool]]) -> None:
    jobs = tuple((at, sizes[second]) for at, second in rows)
    assert scheduled(jobs) == optimum(jobs)


def test_three_services_have_a_counter_example() -> None:
    """Shows that the proof needs two services.

    7 begins alone. 5 waits for it although it should be first, and 2 then delays both.
    """
    jobs = ((0, 7), (3, 5), (7, 2))
    assert scheduled(jobs) == Fraction(17, 2)
    assert optimum(jobs) == Fraction(83, 10)


# --- Figure 2 ------------------------------------------------------------------------------

SIZES = {"S0": 2, "S1": 11}
FIGURE_2 = [("A", "S0", 0), ("B", "S0", 2), ("C", "S1", 5), ("D", "S0", 9), ("E", "S0", 10)]
"""An instance with the published ratios (the figure's own times are not in the text)."""


def figure_2(control: StepControl) -> tuple[float, float, int]:
    """Returns (mean latency of S0, normalised latency, peak number of requests with KV)."""
    engines = {name: EngineStepView(name, execution_s=size) for name, size in SIZES.items()}
    machine = Machine(control, engines, lambda *_: 1.0)
    service = {name: s for name, s, _ in FIGURE_2}
    latency = machine.run([Request(n, s, at, SIZES[s] - 1) for n, s, at in FIGURE_2])
    short = [latency[name] for name in "ABDE"]
    return (
        sum(short) / len(short),
        sum(latency[name] / SIZES[service[name]] for name in latency),
        machine.held_most,
    )


def test_the_ratios_of_figure_2() -> None:
    """Compares with SeaLLM §2.2.

    FCFS has 2.3 times the L0 and twice the L_N. Round robin has 1.3 times the L_N, and KV of three
    requests instead of two.
    """
    ours = figure_2(db.control(LITERAL))
    joining = figure_2(db.control(PATIENT))
    fcfs, turns = figure_2(temporal.FCFS), figure_2(round_robin.ROUND_ROBIN)
    assert round(fcfs[0] / ours[0], 1) == 2.3
    assert round(fcfs[1] / ours[1], 1) == 2.0
    assert round(turns[1] / ours[1], 1) == 1.3
    assert (turns[2], ours[2]) == (3, 2)
    assert joining[1] <= ours[1]


# --- starvation ----------------------------------------------------------------------------


def test_the_starved_go_first_the_longest_waiting_before_all() -> None:
    fresh = one(SHORT, "prefill", StepRequest("s", 99.0, 1, 1))
    a, b = StepRequest("a", 0.0, 1, 1, waiting_s=20.0), StepRequest("b", 0.0, 1, 1, waiting_s=30.0)
    assert names(chosen(fresh, replace(LONG, prefill=(a,), decode=(b,)))) == ("b",)
    patient = a._replace(waiting_s=19.9)
    assert names(chosen(fresh, one(LONG, "prefill", patient))) == ("s",)


def test_a_stream_of_short_requests_starves_nobody() -> None:
    """Checks that a long request never waits longer than its threshold and the current step.

    Without the threshold it would never be served.
    """
    engines = {"short": SHORT, "long": LONG}
    stream = [Request(f"s{i}", "short", i * 0.98, decodes=1) for i in range(400)]
    long = Request("l", "long", 0.5, decodes=7)

    def run(control: StepControl) -> tuple[float, list[float]]:
        machine = Machine(control, engines, lambda *_: 0.5)
        machine.run([*stream, replace(long)], until_s=390.0)
        steps = [at for at, job in machine.log if job.model == "long"]
        return machine.requests["l"].end_s, steps

    assert math.isnan(run(db.control(PATIENT))[0])
    end_s, steps = run(db.control())
    waits = [b - a for a, b in itertools.pairwise([0.5, *steps])]
    assert not math.isnan(end_s)
    assert max(waits) <= db.starvation_s(LONG, DbSettings()) + 2 * 0.5


@pytest.mark.parametrize("count", [1, 3])
def test_several_starved_are_served_one_after_another(count: int) -> None:
    long = {f"long{i}": replace(LONG, model=f"long{i}") for i in range(count)}
    stream = [Request(f"s{i}", "short", i * 0.98, decodes=1) for i in range(300)]
    others = [Request(name, name, 0.5, decodes=3) for name in long]
    machine = Machine(db.control(), {"short": SHORT, **long}, lambda *_: 0.5)
    machine.run([*stream, *others], until_s=290.0)
    threshold_s = db.starvation_s(LONG, DbSettings())
    for name in long:
        steps = [at for at, job in machine.log if job.model == name]
        waits = [b - a for a, b in itertools.pairwise([0.5, *steps])]
        assert max(waits) <= threshold_s + (count + 1) * 0.5
        assert not math.isnan(machine.requests[name].end_s)
