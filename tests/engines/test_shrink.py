"""Answers of every engine to the ledger's shrink requests, idle or busy, with correct outputs; and
memory that a model may count on when it is activated."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator

from kvcached import ClientUsage
from prism.messages.engine import ActivateEngine, ActivationFailed, Deactivate, Deactivated, Submit
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Request
from tests.engines.harness import DeviceUnderTest, request
from tests.engines.subjects import Subject

_ids = (f"k{i}" for i in itertools.count())


def requests_of(subject: Subject, model: ModelSpec, count: int, seed: int) -> list[Request]:
    tokens = model.context_length // 4
    prompts = subject.prompts(count, seed, (tokens, tokens))
    return [request(next(_ids), model.name, p, tokens) for p in prompts]


def check_outputs(device: DeviceUnderTest, subject: Subject, asked: list[Request]) -> None:
    streams = device.finish(*(r.id for r in asked), timeout_s=240.0)
    assert [s.failure for s in streams] == [None] * len(streams)
    assert [s.token_ids for s in streams] == [subject.expected(r) for r in asked]


def answered(device: DeviceUnderTest, engine: str) -> ClientUsage:
    """Waits for the engine's answer in the ledger; a waiting client resumes a moment earlier."""
    while True:
        device.fresh_status(engine)
        usage = device.client_usage(engine)
        assert usage is not None
        if usage.evicted_tokens > 0:
            return usage


def test_an_engine_without_a_model_answers(device: DeviceUnderTest, engine: str) -> None:
    assert device.trim(engine).returned_bytes == 0


def test_an_idle_engine_gives_a_neighbour_its_cache(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    model = subject.models[0]
    device.activate(model, engine)
    asked = requests_of(subject, model, count=6, seed=21)
    subject.learn(device, engine, asked)
    device.send(Submit(asked), engine)
    check_outputs(device, subject, asked)
    device.settled_status(lambda s: s.running == 0 and s.evictable_tokens > 0, engine)
    before = device.client_usage(engine)
    assert before is not None
    assert before.evictable_bytes > 0
    with device.memory.client("neighbour") as neighbour:
        wanted_bytes = device.memory.usage().free_bytes + subject.page_bytes
        neighbour.reserve_static(wanted_bytes, "weights", wait_s=60.0).release()
    after = answered(device, engine)
    assert after.committed_bytes < before.committed_bytes
    again = [request(next(_ids), model.name, r.prompt_ids, r.sampling.max_tokens) for r in asked]
    device.send(Submit(again), engine)
    check_outputs(device, subject, again)


def test_a_busy_engine_answers_and_its_requests_are_unharmed(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    model = subject.models[0]
    device.activate(model, engine)
    asked = requests_of(subject, model, count=8, seed=22)
    subject.learn(device, engine, asked)
    device.send(Submit(asked), engine)
    open_ids = {r.id for r in asked}
    answers = 0
    while open_ids:
        device.finish_one(open_ids)
        answers += device.trim(engine).outcome == "answered"
    assert answers > 0
    check_outputs(device, subject, asked)


def test_a_lower_limit_is_kept_at_once(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    """Limits the idle engine from outside; it evicts without waiting for a request."""
    model = subject.models[0]
    reserve_bytes = device.activate(model, engine).reserve_bytes
    asked = requests_of(subject, model, count=8, seed=23)
    subject.learn(device, engine, asked)
    device.send(Submit(asked), engine)
    check_outputs(device, subject, asked)

    def held_bytes() -> int:
        usage = device.client_usage(engine)
        assert usage is not None
        return usage.reserved_bytes

    if held_bytes() > reserve_bytes:
        device.memory.set_limit(engine, reserve_bytes)
        device.wait_until(lambda: held_bytes() <= reserve_bytes)
        device.memory.set_limit(engine, None)


# --- a model is activated while others hold the memory


def fill_cache(device: DeviceUnderTest, engine: str, subject: Subject) -> list[Request]:
    """Serves six requests of half the context each, whose KV stays in the idle engine's cache."""
    asked = requests_of(subject, subject.models[0], count=6, seed=31)
    subject.learn(device, engine, asked)
    device.send(Submit(asked), engine)
    check_outputs(device, subject, asked)
    device.settled_status(lambda s: s.running == 0 and s.evictable_tokens > 0, engine)
    return asked


def deactivate(device: DeviceUnderTest, engine: str) -> None:
    device.send(Deactivate(), engine)
    device.wait_for(Deactivated, engine)


def committed_bytes(device: DeviceUnderTest, engine: str) -> int:
    usage = device.client_usage(engine)
    assert usage is not None
    return usage.committed_bytes


@contextlib.contextmanager
def short_by(device: DeviceUnderTest, need_bytes: int, missing_bytes: int) -> Iterator[None]:
    """Leaves `missing_bytes` less free than `need_bytes`: other static memory takes the rest."""
    with device.memory.client("hog") as hog:
        free_bytes = device.memory.usage().free_bytes
        assert free_bytes >= need_bytes
        lease = hog.reserve_static(free_bytes - need_bytes + missing_bytes, "test")
        yield
        lease.release()


def need_of_second(device: DeviceUnderTest, engine: str, subject: Subject) -> int:
    activated = device.activate(subject.models[1], engine)
    deactivate(device, engine)
    return activated.static_bytes + activated.reserve_bytes


def test_neighbours_shrink_first_and_get_it_back_at_once(
    device: DeviceUnderTest, engine: str, second_engine: str, subject: Subject
) -> None:
    need_bytes = need_of_second(device, second_engine, subject)
    quantum_bytes = device.activate(subject.models[0], engine).quantum_bytes
    asked = fill_cache(device, engine, subject)
    before_bytes = committed_bytes(device, engine)
    with short_by(device, need_bytes, quantum_bytes):
        activated = device.activate(subject.models[1], second_engine)
        assert committed_bytes(device, engine) < before_bytes
        assert next(iter(activated.stages_s)) == "shrink"
        usage = device.memory.usage()
        assert usage.reserved_bytes <= usage.capacity_bytes
        beside = device.fresh_status(engine).available_tokens
        deactivate(device, second_engine)
        assert device.memory.usage().free_bytes >= need_bytes
        assert device.client_usage(second_engine).reserved_bytes == 0  # type: ignore[union-attr]
        assert device.fresh_status(engine).available_tokens > beside
    again = [request(next(_ids), r.model, r.prompt_ids, r.sampling.max_tokens) for r in asked]
    device.send(Submit(again), engine)
    check_outputs(device, subject, again)


def test_a_neighbour_that_gives_nothing_is_not_waited_for_without_end(
    device: DeviceUnderTest, engine: str, second_engine: str, subject: Subject
) -> None:
    need_bytes = need_of_second(device, second_engine, subject)
    quantum_bytes = device.activate(subject.models[0], engine).quantum_bytes
    fill_cache(device, engine, subject)
    with short_by(device, need_bytes, quantum_bytes):
        free_bytes = device.memory.usage().free_bytes
        os.kill(device.pids[engine], signal.SIGSTOP)
        try:
            device.send(ActivateEngine(subject.models[1]), second_engine)
            failed = device.wait_for(ActivationFailed, second_engine)
        finally:
            os.kill(device.pids[engine], signal.SIGCONT)
        assert failed.missing_bytes == quantum_bytes
        assert device.memory.usage().free_bytes >= free_bytes
        device.activate(subject.models[1], second_engine)
