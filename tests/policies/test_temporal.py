"""Temporal sharing: whose step is next, first come first served and round robin."""

from __future__ import annotations

import math

from lab.papers.ablations import round_robin
from prism.policies.baselines import temporal
from prism.policies.multiplexing.steps import (
    DeviceStepView,
    EngineStepView,
    Phase,
    StepChoice,
    StepRequest,
)
from tests.policies.machine import Machine, Request


def waiting(id: str, arrival_s: float, kv_tokens: int = 1) -> StepRequest:
    return StepRequest(id, arrival_s, kv_tokens, kv_tokens)


def device(*engines: EngineStepView, kv: int = 1000) -> DeviceStepView:
    return DeviceStepView(10.0, engines, kv)


def chosen(view: DeviceStepView) -> tuple[str, Phase, tuple[str, ...]]:
    choice, _ = temporal.fcfs(view, None)
    (job,) = choice.jobs
    return job.model, job.phase, job.requests


def test_the_engine_with_the_oldest_unfinished_request_runs() -> None:
    a = EngineStepView("a", prefill=(waiting("a1", 2.0),))
    b = EngineStepView("b", decode=(waiting("b1", 1.0),), prefill=(waiting("b2", 3.0),))
    assert chosen(device(a, b)) == ("b", Phase.PREFILL, ("b2",))
    b = EngineStepView("b", decode=(waiting("b1", 1.0), waiting("b2", 3.0)))
    assert chosen(device(a, b)) == ("b", Phase.DECODE, ("b1", "b2"))


def test_decodes_hold_until_something_changes_and_prefills_do_not() -> None:
    a = EngineStepView("a", decode=(waiting("a1", 2.0),))
    assert temporal.fcfs(device(a), None)[0].holds_s == math.inf
    b = EngineStepView("b", prefill=(waiting("b1", 2.0),))
    assert temporal.fcfs(device(b), None)[0].holds_s == 0.0


def test_one_at_a_time() -> None:
    busy = EngineStepView("a", busy=frozenset({Phase.DECODE}))
    ready = EngineStepView("b", prefill=(waiting("b1", 1.0),))
    assert temporal.fcfs(device(busy, ready), None)[0] == StepChoice((), math.inf)
    assert round_robin.round_robin(device(busy, ready), 1) == (StepChoice((), math.inf), 1)


def test_prefills_stop_where_memory_or_the_batch_ends() -> None:
    three = tuple(waiting(f"a{i}", float(i), kv_tokens=40) for i in range(3))
    a = EngineStepView("a", prefill=three, token_bytes=10)
    assert chosen(device(a, kv=900))[2] == ("a0", "a1")
    narrow = EngineStepView("a", prefill=three, batch_max=1)
    assert chosen(device(narrow))[2] == ("a0",)
    full = EngineStepView("a", prefill=three, kv_bytes=995, token_bytes=1)
    assert temporal.fcfs(device(full), None)[0].jobs == ()
    other = EngineStepView("b", decode=(waiting("b1", 9.0),))
    assert chosen(device(full, other)) == ("b", Phase.DECODE, ("b1",))


def test_round_robin_takes_turns_and_skips_the_idle() -> None:
    a = EngineStepView("a", decode=(waiting("a1", 1.0),))
    b = EngineStepView("b")
    c = EngineStepView("c", decode=(waiting("c1", 2.0),))
    state, turns = 0, []
    for _ in range(4):
        choice, state = round_robin.round_robin(device(a, b, c), state)
        turns.append(choice.jobs[0].model)
        assert choice.holds_s == 0.0
    assert turns == ["a", "c", "a", "c"]
    assert round_robin.round_robin(device(a, b), 1)[0].holds_s == math.inf
    assert round_robin.round_robin(device(b), 0) == (StepChoice((), math.inf), 0)


def test_the_head_of_the_line_blocks() -> None:
    """Checks SeaLLM §2.2: under FCFS a long request delays another service's short ones.

    Under round robin it delays them less.
    """
    engines = {name: EngineStepView(name) for name in ("long", "short")}

    def latency(control: temporal.StepControl) -> float:
        machine = Machine(control, engines, lambda *_: 1.0)
        arrivals = [Request("l", "long", 0.0, 20), Request("s", "short", 0.5, 2)]
        return machine.run(arrivals)["s"]

    assert latency(temporal.FCFS) == 23.5
    assert latency(round_robin.ROUND_ROBIN) == 5.5
