"""Agents that a cluster waits for before it is first ready; the book's models, and its cost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from random import Random
from types import FrameType
from typing import Any

from msgspec import structs

from prism.cluster.repairs import repairs
from prism.cluster.state.actions import Move
from prism.cluster.state.agents import AgentBook
from prism.cluster.state.scheduler_state import SchedulerState
from prism.cluster.status import build_status
from prism.cluster.view import build_view
from prism.config.schema.cluster_config import DeviceConfig
from prism.messages.agent import AgentReport, ModelReport
from tests.cluster.conftest import MODEL_BYTES, spec
from tests.cluster.test_cluster_view import make_state

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
    assert agents.not_started() == ["host:1"]


def test_an_agent_that_is_never_heard_is_waited_for_until_the_grace_ends() -> None:
    agents = book()
    agents.take(report("host:0"), 1.0)
    assert not agents.all_started(GRACE_S - 1)
    assert agents.all_started(GRACE_S)


def test_the_book_knows_each_model_as_its_last_reports_say() -> None:
    """Compares the book with a plain dict over random reports."""
    random, devices = Random(7), [f"host:{i}" for i in range(9)]
    agents, last = AgentBook(devices, 0.0, GRACE_S), dict[str, AgentReport]()
    for now_s in range(400):
        device = random.choice(devices)
        if device in last and random.random() < 0.2:
            agents.drop(device)
            del last[device]
        else:
            states = ("active", "activating", "draining", "failed")
            names = random.sample("abcdef", random.randrange(5))
            models = [ModelReport(name, random.choice(states)) for name in names]
            last[device] = structs.replace(report(device), models=models)
            agents.take(last[device], float(now_s))
        assert agents.models() == {m.model for each in last.values() for m in each.models}
        for name in "abcdef":
            rows = [(d, last[d].models) for d in devices if d in last]
            found = [(d, m) for d, models in rows for m in models if m.model == name]
            assert agents.of(name) == found
            assert agents.where(name, "active") == [d for d, m in found if m.state == "active"]
            assert [agents.model(d, name) for d, _ in found] == [m for _, m in found]


def steps(work: Callable[[], object]) -> int:
    """Returns the number of bytecodes that `work` runs."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_a_step_costs_as_much_for_each_device_of_a_large_cluster() -> None:
    """Covers view, repairs and status, which all grow with the cluster."""

    def step(state: SchedulerState) -> None:
        repairs(state, 100.0)
        build_status(state, build_view(state, 100.0))

    small, large = (steps(partial(step, full_of(devices))) for devices in (10, 40))
    assert large < 4.4 * small


def full_of(devices: int) -> SchedulerState:
    """Returns a cluster with five models on each device, and as many that another activates."""
    names = [f"m{i}" for i in range(10 * devices)]
    state = make_state(*map(spec, names))
    config = [DeviceConfig(f"host:{i}", 20 * MODEL_BYTES, 4096, 12) for i in range(devices)]
    state = SchedulerState(
        structs.replace(state.config, devices=config), state.policy, state.timing, state.now_s
    )
    for i in range(devices):
        here = names[5 * i : 5 * i + 5]
        models = [ModelReport(name, "active") for name in here]
        state.book.take(structs.replace(report(f"host:{i}"), models=models), 100.0)
        for name in here:
            state.routes.placement[name] = (f"host:{i}",)
        coming = names[5 * (devices + i)]
        state.actions.moves[coming] = Move("activate", coming, f"host:{i}")
        state.activations.failed(coming, f"host:{i}", "no room", 100.0)
    return state


def test_devices_come_and_go_while_the_scheduler_runs() -> None:
    agents = book()
    for device in ("host:0", "host:1"):
        agents.take(report(device), 1.0)
    agents.serve(["host:2", "host:1"])
    assert [each.device for each in agents.reports()] == ["host:1"]
    assert not agents.knows("host:0")
    assert agents.is_gone("host:0", 2.0)
    assert not agents.is_gone("host:2", 2.0), "it may be starting"
    assert agents.is_gone("host:2", GRACE_S + 1)
    agents.take(report("host:2"), GRACE_S + 2)
    assert [each.device for each in agents.reports()] == ["host:2", "host:1"]
