"""Jobs of a controlled engine: requests get tokens only from them, the same as without control."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import msgspec

from prism.engines.core import StepOutput
from prism.engines.processes.jobs import Jobs
from prism.messages.engine import (
    Activated,
    Deactivate,
    Deactivated,
    EndRun,
    EngineStatus,
    Export,
    Exported,
    JobEnded,
    Phase,
    StartJob,
    Submit,
)
from prism.messages.requests import Cancel, Request
from tests.engines import test_pausing
from tests.engines.harness import DeviceUnderTest
from tests.engines.subjects import Subject
from tests.engines.test_pausing import counts, ids, make


def controlled(subject: Subject, device: DeviceUnderTest, engine: str) -> Activated:
    return device.activate(subject.models[0], engine, controlled=True)


def check(subject: Subject, device: DeviceUnderTest, engine: str, items: list[Request]) -> None:
    """Compares the outputs with those of the engine without control."""
    device.finish(*ids(items))
    device.send(Deactivate(), engine)
    device.wait_for(Deactivated, engine)
    device.activate(subject.models[0], engine)
    test_pausing.check(subject, device, engine, items)


def run(
    device: DeviceUnderTest, engine: str, phase: Phase, items: list[Request], steps: int = 1
) -> JobEnded:
    """Runs a job to its end."""
    device.send(StartJob(phase, ids(items), steps), engine)
    ended = device.wait_for(JobEnded, engine)
    assert ended.phase == phase
    return ended


def test_requests_get_tokens_only_from_their_jobs(
    subject: Subject, device: DeviceUnderTest, engine: str
) -> None:
    controlled(subject, device, engine)
    items = make(subject, 3, 40)
    device.send(Submit(items), engine)
    assert run(device, engine, "prefill", items[:2]).steps > 0
    assert counts(device, items) == [1, 1, 0]
    assert run(device, engine, "decode", items[1:2], steps=4).steps == 4
    assert counts(device, items) == [1, 5, 0]
    run(device, engine, "prefill", items[2:])
    ended = run(device, engine, "decode", items, steps=2)
    assert counts(device, items) == [3, 7, 3]
    assert ended.seconds > 0
    assert not ended.lacks_memory
    device.send(StartJob("decode", ids(items)), engine)
    assert device.wait_for(JobEnded, engine).steps == 37
    check(subject, device, engine, items)


def test_jobs_in_random_order_change_no_token(
    subject: Subject, device: DeviceUnderTest, engine: str
) -> None:
    """Prompts of some chunks, more requests than run at a time, and prefills during runs."""
    rng = random.Random(5)
    controlled(subject, device, engine)
    items = make(subject, 10, 30, seed=9, length=(3, 200))
    device.send(Submit(items), engine)
    waiting, running = list(items), []
    while waiting:
        now = [waiting.pop() for _ in range(min(len(waiting), rng.randint(1, 3)))]
        run(device, engine, "prefill", now)
        running += now
        run(device, engine, "decode", rng.sample(running, rng.randint(1, len(running))))
    open_ = [item for item, seen in zip(items, counts(device, items), strict=True) if seen < 30]
    device.send(StartJob("decode", ids(open_)), engine)
    check(subject, device, engine, items)


def test_a_run_continues_after_a_prefill_and_ends_on_order(
    subject: Subject, device: DeviceUnderTest, engine: str
) -> None:
    controlled(subject, device, engine)
    items = make(subject, 2, 400)
    device.send(Submit(items), engine)
    run(device, engine, "prefill", items[:1])
    device.send(StartJob("decode", ids(items[:1])), engine)
    device.wait_until(lambda: counts(device, items)[0] > 3)
    run(device, engine, "prefill", items[1:])
    before = counts(device, items)
    assert before[1] == 1
    device.wait_until(lambda: counts(device, items)[0] > before[0])
    device.send(EndRun(), engine)
    assert device.wait_for(JobEnded, engine).phase == "decode"
    after = counts(device, items)
    device.fresh_status(engine)
    assert counts(device, items) == after
    assert after[1] == 1
    device.send(StartJob("decode", ids(items)), engine)
    check(subject, device, engine, items)


def test_jobs_end_without_their_requests(
    subject: Subject, device: DeviceUnderTest, engine: str, second_engine: str
) -> None:
    """Ends jobs of unknown, cancelled and exported requests. The last continue at another
    controlled engine."""
    controlled(subject, device, engine)
    controlled(subject, device, second_engine)
    items = make(subject, 3, 300)
    assert run(device, engine, "prefill", items).steps == 0
    device.send(Submit(items), engine)
    device.send(Cancel(ids(items[:1])), engine)
    assert device.finish(items[0].id)[0].finish_reason == "cancelled"
    assert run(device, engine, "prefill", items[:1]).steps == 0
    run(device, engine, "prefill", items[1:])
    device.send(StartJob("decode", ids(items[1:])), engine)
    device.wait_until(lambda: min(counts(device, items[1:])) > 3)
    device.send(Export(()), engine)
    moved = device.wait_for(Exported, engine).requests
    assert device.wait_for(JobEnded, engine).phase == "decode"
    device.send(Submit(moved), second_engine)
    run(device, second_engine, "prefill", moved)
    device.send(StartJob("decode", ids(moved)), second_engine)
    check(subject, device, second_engine, items[1:])


def test_a_job_that_computes_nothing_ends() -> None:
    """Distinguishes it from a step that computes a part of a prompt, without tokens either."""
    status = EngineStatus("e0", "m", pending_prefill_tokens=100)
    core: Any = SimpleNamespace(pause=print, resume=print, status=lambda: status)
    sent: list[JobEnded] = []
    jobs = Jobs(core, sent.append)
    jobs.start(StartJob("prefill", ["a", "b"]), {"a"})
    for pending_tokens in (100, 50, 20, 20, 20):
        status = msgspec.structs.replace(status, pending_prefill_tokens=pending_tokens)
        jobs.stepped(StepOutput(), 0.5, stalled=True)
        assert not sent
    jobs.stepped(StepOutput(), 0.5, stalled=True)
    assert sent == [JobEnded("prefill", 3.0, 6, lacks_memory=True)]


def test_an_eviction_ends_control(subject: Subject, device: DeviceUnderTest, engine: str) -> None:
    controlled(subject, device, engine)
    items = make(subject, 1, 300)
    device.send(Submit(items), engine)
    run(device, engine, "prefill", items)
    device.send(StartJob("decode", ids(items)), engine)
    device.send(Deactivate(), engine)
    device.wait_for(Deactivated, engine)
    failures = [stream.failure for stream in device.finish(*ids(items))]
    assert [f and f.code for f in failures] == ["model_evicted"]
    device.activate(subject.models[0], engine)
    again = make(subject, 1, 20, seed=4)
    device.send(Submit(again), engine)
    test_pausing.check(subject, device, engine, again)
