"""Requests that are paused by id: they stand still with their KV, and their tokens are the same."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prism.engines.core import StepOutput
from prism.engines.processes.worker import STALLED_RETRY_S, Worker
from prism.messages import Wire
from prism.messages.engine import (
    Deactivate,
    Deactivated,
    EngineStatus,
    Export,
    Exported,
    PauseRequests,
    ResumeRequests,
    Submit,
)
from prism.messages.requests import Cancel, Request
from tests.engines.harness import DEVICE, DeviceUnderTest, request
from tests.engines.subjects import Subject

_numbers = itertools.count()


def carry_out(device: DeviceUnderTest, engine: str, message: Wire) -> None:
    """Sends a message and waits until the engine has handled it: a request for another model, sent
    after it, is refused."""
    last = request(f"p{next(_numbers)}", "another model", [1], 1)
    device.send(message, engine)
    device.send(Submit([last]), engine)
    device.finish(last.id)


def make(
    subject: Subject, count: int, tokens: int, seed: int = 3, length: tuple[int, int] = (20, 60)
) -> list[Request]:
    prompts = subject.prompts(count, seed, length)
    return [request(f"p{next(_numbers)}", subject.models[0].name, p, tokens) for p in prompts]


def start(
    subject: Subject, device: DeviceUnderTest, engine: str, count: int, prompt_tokens: int = 40
) -> list[Request]:
    """Activates a model and submits requests for it that put out a few tokens of many."""
    device.activate(subject.models[0], engine)
    items = make(subject, count, 100, length=(prompt_tokens, prompt_tokens + 20))
    device.send(Submit(items), engine)
    device.wait_until(lambda: all(len(device.stream(i.id).token_ids) > 4 for i in items))
    return items


def check(subject: Subject, device: DeviceUnderTest, engine: str, items: list[Request]) -> None:
    outputs = [stream.token_ids for stream in device.finish(*(item.id for item in items))]
    subject.learn(device, engine, items)
    assert outputs == [subject.expected(item) for item in items]


def counts(device: DeviceUnderTest, items: list[Request]) -> list[int]:
    return [len(device.stream(item.id).token_ids) for item in items]


def ids(items: list[Request]) -> list[str]:
    return [item.id for item in items]


def test_paused_requests_stand_still_and_others_do_not(
    subject: Subject, device: DeviceUnderTest, engine: str
) -> None:
    """Pauses two of three that run, and one that waits. After the third has ended the engine has
    nothing to compute, and still all three."""
    items = start(subject, device, engine, 3)
    device.send(Submit(waiting := make(subject, 1, 100, seed=4)), engine)
    stopped = [*items[:2], *waiting]
    carry_out(device, engine, PauseRequests([*ids(stopped), "unknown"]))
    seen = counts(device, stopped)
    assert max(seen) < 100
    check(subject, device, engine, items[2:])

    def is_kept(status: EngineStatus) -> bool:
        return status.running + status.waiting == len(stopped)

    device.settled_status(is_kept, engine)
    assert counts(device, stopped) == seen
    carry_out(device, engine, ResumeRequests([*ids(stopped), "unknown"]))
    check(subject, device, engine, stopped)
    assert device.fresh_status(engine).retractions_total == 0


@pytest.mark.parametrize("seed", range(3))
def test_pauses_at_random_moments_change_no_token(
    subject: Subject, device: DeviceUnderTest, engine: str, seed: int
) -> None:
    """Pauses and resumes random requests with prompts of some chunks, more than run at a time."""
    rng = random.Random(seed)
    device.activate(subject.models[0], engine)
    items = make(subject, 12, 40, seed=seed + 50, length=(3, 200))
    later = {item.id: item for item in items}
    while later:
        now = rng.sample(sorted(later), min(len(later), rng.randint(1, 4)))
        device.send(Submit([later.pop(i) for i in now]), engine)
        device.send(PauseRequests(rng.sample(ids(items), 5)), engine)
        carry_out(device, engine, ResumeRequests(rng.sample(ids(items), 4)))
    for _ in range(30):
        device.send(PauseRequests(rng.sample(ids(items), rng.randint(1, 8))), engine)
        carry_out(device, engine, ResumeRequests(rng.sample(ids(items), rng.randint(1, 8))))
    device.send(ResumeRequests(ids(items)), engine)
    check(subject, device, engine, items)


def test_a_paused_request_can_be_cancelled(
    subject: Subject, device: DeviceUnderTest, engine: str
) -> None:
    items = start(subject, device, engine, 3)
    device.send(Submit(waiting := make(subject, 1, 100, seed=4)), engine)
    items += waiting
    carry_out(device, engine, PauseRequests(ids(items)))
    stopped, rest = [items[0], items[3]], items[1:3]
    device.send(Cancel(ids(stopped)), engine)
    ended = device.finish(*ids(stopped))
    assert {stream.finish_reason for stream in ended} == {"cancelled"}
    device.send(ResumeRequests(ids(items)), engine)
    check(subject, device, engine, rest)
    device.settled_status(lambda s: s.running + s.waiting == 0, engine)


def test_paused_requests_are_exported_with_their_kv(
    subject: Subject, device: DeviceUnderTest, engine: str, second_engine: str
) -> None:
    """Pauses two of three requests. All three continue at another engine, unpaused."""
    device.activate(subject.models[0], second_engine)
    items = start(subject, device, engine, 3)
    carry_out(device, engine, PauseRequests(ids(items[:2])))
    device.send(Export((DEVICE,)), engine)
    moved = {item.id: item for item in device.wait_for(Exported, engine).requests}
    for item in items[:2]:
        resume = moved[item.id].resume
        assert resume is not None
        assert len(resume.output_ids) == len(device.stream(item.id).token_ids)
        assert bool(resume.kv_offers) is subject.moves_kv
    device.send(Submit(list(moved.values())), second_engine)
    device.finish(*moved)
    came = sum(item.resume.kv_tokens for item in moved.values() if item.resume)
    imported = device.fresh_status(second_engine).imported_tokens_total
    assert came - 16 * len(moved) <= imported <= came
    check(subject, device, second_engine, items)


def test_an_exported_request_is_not_paused_where_it_comes_back(
    subject: Subject, device: DeviceUnderTest, engine: str
) -> None:
    items = start(subject, device, engine, 2)
    carry_out(device, engine, PauseRequests(ids(items)))
    device.send(Export(()), engine)
    device.send(Submit(device.wait_for(Exported, engine).requests), engine)
    check(subject, device, engine, items)


def test_paused_requests_fail_with_an_eviction(
    subject: Subject, device: DeviceUnderTest, engine: str
) -> None:
    items = start(subject, device, engine, 2)
    carry_out(device, engine, PauseRequests(ids(items)))
    device.send(Deactivate(), engine)
    device.wait_for(Deactivated, engine)
    failures = [stream.failure for stream in device.finish(*ids(items))]
    assert {f and (f.code, f.retryable) for f in failures} == {("model_evicted", True)}
    usage = device.client_usage(engine)
    assert usage is not None
    assert usage.reserved_bytes == usage.committed_bytes == 0
    again = start(subject, device, engine, 1)
    check(subject, device, engine, again)


def test_memory_of_paused_requests_comes_back_after_a_death(
    subject: Subject, device: DeviceUnderTest, engine: str
) -> None:
    items = start(subject, device, engine, 2)
    carry_out(device, engine, PauseRequests(ids(items)))
    os.kill(device.pids[engine], signal.SIGKILL)
    device.exited(engine)
    device.memory.reap()
    assert device.client_usage(engine) is None


def test_a_shrink_leaves_the_kv_of_paused_requests(
    subject: Subject, device: DeviceUnderTest, engine: str
) -> None:
    items = start(subject, device, engine, 2)
    carry_out(device, engine, PauseRequests(ids(items)))
    device.trim(engine)
    usage = device.client_usage(engine)
    assert usage is not None
    held_bytes = sum(len(i.prompt_ids) for i in items) * subject.models[0].token_bytes
    assert usage.committed_bytes >= held_bytes
    device.send(ResumeRequests(ids(items)), engine)
    check(subject, device, engine, items)
    assert device.fresh_status(engine).retractions_total == 0


@contextlib.contextmanager
def little_room(subject: Subject, device: DeviceUnderTest, engine: str) -> Iterator[None]:
    """Leaves the engine the memory that it uses, and that of one request of full context."""
    with device.memory.client("thief") as thief:
        device.trim(engine)
        free_bytes = device.memory.usage().free_bytes
        lease = thief.reserve_static(free_bytes // subject.page_bytes * subject.page_bytes, "loot")
        yield
        lease.release()


@pytest.mark.parametrize("resumed", ["before", "after"])
def test_paused_requests_give_their_memory_before_others_wait(
    subject: Subject, device: DeviceUnderTest, engine: str, resumed: str
) -> None:
    """Leaves room for one request of full context. Another request needs most of that while paused
    ones hold it: it runs to its end, before they are resumed or in competition with them."""
    items = start(subject, device, engine, 3, prompt_tokens=120)
    carry_out(device, engine, PauseRequests(ids(items)))
    seen = counts(device, items)
    large = make(subject, 1, 300, seed=5, length=(150, 151))
    with little_room(subject, device, engine):
        device.send(Submit(large), engine)
        if resumed == "before":
            device.wait_until(lambda: len(device.stream(large[0].id).token_ids) > 4)
        else:
            device.finish(*ids(large))
            assert counts(device, items) == seen
            status = device.settled_status(lambda s: s.running + s.waiting == len(items), engine)
            assert status.retractions_total > 0
            assert status.pending_prefill_tokens > 0
        device.send(ResumeRequests(ids(items)), engine)
        device.finish(*ids([*items, *large]))
    check(subject, device, engine, [*items, *large])


def test_paused_requests_are_retracted_before_running_ones(
    subject: Subject, device: DeviceUnderTest, engine: str
) -> None:
    """Leaves no room for two running requests to grow: the paused one makes it, though it is the
    oldest."""
    device.activate(subject.models[0], engine)
    items = [
        *make(subject, 1, 80, length=(400, 401)),
        *make(subject, 2, 110, seed=5, length=(60, 61)),
    ]
    device.send(Submit(items), engine)
    device.wait_until(lambda: min(counts(device, items)) > 2)
    carry_out(device, engine, PauseRequests(ids(items[:1])))
    with little_room(subject, device, engine):
        device.finish(*ids(items[1:]))
        status = device.settled_status(lambda s: s.running + s.waiting == 1, engine)
        assert (status.waiting, status.retractions_total) == (1, 1)
        device.send(ResumeRequests(ids(items)), engine)
        device.finish(*ids(items))
    check(subject, device, engine, items)


def test_a_worker_with_only_paused_requests_waits_for_messages() -> None:
    nothing: Any = lambda *arguments: None  # noqa: E731
    core = SimpleNamespace(submit=nothing, pause=nothing, resume=nothing, step=StepOutput)
    link = SimpleNamespace(send=nothing)
    worker = Worker(*cast("Any", (core, link, "e0", lambda: 0.0)))
    worker._model, worker._status_at_s = "a", 0.0
    worker._handle(Submit([request("r", "a", [1]), request("s", "a", [1])]))
    worker._handle(PauseRequests(["r", "unknown"]))
    assert worker._poll_timeout_s() == STALLED_RETRY_S
    worker._handle(PauseRequests(["s"]))
    assert worker._poll_timeout_s() > STALLED_RETRY_S
    worker._handle(ResumeRequests(["r"]))
    assert worker._poll_timeout_s() == STALLED_RETRY_S
