"""Memory rules for every engine: take it late, give it back, never exceed the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

import kvcached
from prism.messages.engine import (
    ActivateEngine,
    ActivationFailed,
    Deactivate,
    Deactivated,
    SetLimit,
    Submit,
)
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Request
from tests.engines.harness import DeviceUnderTest, request
from tests.engines.subjects import Subject

_ids = (f"m{i}" for i in itertools.count())


def long_requests(subject: Subject, model: ModelSpec, count: int, seed: int) -> list[Request]:
    """Makes requests that end at two thirds of the context: together more than the device can
    hold."""
    tokens = model.context_length // 3
    prompts = subject.prompts(count, seed, (tokens, tokens))
    return [request(next(_ids), model.name, p, tokens) for p in prompts]


def serve(device: DeviceUnderTest, engine: str, requests: list[Request]) -> list[list[int]]:
    device.send(Submit(requests), engine)
    streams = device.finish(*(r.id for r in requests), timeout_s=240.0)
    assert [s.failure for s in streams] == [None] * len(streams)
    return [s.token_ids for s in streams]


def trim_all(device: DeviceUnderTest, engine: str) -> None:
    """Trims the engine; waits until its status agrees, since earlier statuses may still arrive."""
    device.trim(engine)
    usage = device.client_usage(engine)
    assert usage is not None
    device.settled_status(lambda s: s.kv_mapped_bytes == usage.committed_bytes, engine)


def peak_mapped_bytes(device: DeviceUnderTest, engine: str, since: int) -> int:
    mine = [s.kv_mapped_bytes for s in device.statuses[since:] if s.engine_id == engine]
    return max(mine)


def free_bytes_while(device: DeviceUnderTest, request_ids: list[str]) -> Iterator[int]:
    """Yields the ledger's free bytes after each of these requests; checks that use never exceeds
    it."""
    open_ids = set(request_ids)
    while open_ids:
        device.finish_one(open_ids)
        usage = device.memory.usage()
        assert usage.reserved_bytes <= usage.capacity_bytes
        assert device.memory.resident_bytes() <= usage.capacity_bytes
        yield usage.free_bytes


def test_trim_returns_the_prefix_cache(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    model = subject.models[0]
    floor_bytes = device.activate(model, engine).floor_bytes
    requests = long_requests(subject, model, count=3, seed=1)
    subject.learn(device, engine, requests)
    assert serve(device, engine, requests) == [subject.expected(r) for r in requests]
    status = device.settled_status(lambda s: s.running == 0, engine)
    assert status.evictable_tokens > 0
    assert status.kv_mapped_bytes > floor_bytes
    assert status.available_tokens >= status.evictable_tokens

    some = device.trim(engine, target_bytes=1)
    assert 0 < some.returned_bytes <= status.kv_mapped_bytes - floor_bytes
    rest = device.trim(engine)
    assert some.returned_bytes + rest.returned_bytes == status.kv_mapped_bytes - floor_bytes
    usage = device.client_usage(engine)
    assert usage is not None
    assert usage.committed_bytes == floor_bytes
    assert device.memory.resident_bytes() <= floor_bytes + usage.static_bytes
    # The rest of the cache shares a slab with the padding block.
    after = device.settled_status(lambda s: s.kv_mapped_bytes == floor_bytes, engine)
    assert after.evictable_tokens < status.evictable_tokens
    assert after.unmaps_total > status.unmaps_total

    again = [request(next(_ids), model.name, r.prompt_ids, r.sampling.max_tokens) for r in requests]
    assert serve(device, engine, again) == [subject.expected(r) for r in requests]


def test_a_cached_prefix_is_reused(device: DeviceUnderTest, engine: str, subject: Subject) -> None:
    model = subject.models[0]
    device.activate(model, engine)
    first = long_requests(subject, model, count=1, seed=2)
    second = [request(next(_ids), model.name, r.prompt_ids, 8) for r in first]
    outputs = serve(device, engine, first)
    assert [t[:8] for t in outputs] == serve(device, engine, second)
    assert device.stream(first[0].id).chunks[0].cached_tokens == 0
    assert device.stream(second[0].id).chunks[0].cached_tokens > 0


def test_no_room_says_how_many_bytes_are_missing(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    """Activates once exactly that many more bytes are free; a failed activation keeps no memory."""
    model = subject.models[0]
    page_bytes = subject.page_bytes
    with device.memory.client("hog") as hog:
        free_bytes = device.memory.usage().free_bytes
        lease = hog.reserve_static(free_bytes - 16 * page_bytes, "test")
        device.send(ActivateEngine(model=model), engine)
        failed = device.wait_for(ActivationFailed, engine)
        assert failed.model == model.name
        assert failed.missing_bytes > 0
        assert device.memory.usage().free_bytes == 16 * page_bytes
        assert device.fresh_status(engine).model is None

        lease.release()
        missing_pages = -(-failed.missing_bytes // page_bytes)
        size_bytes = free_bytes - (16 + missing_pages) * page_bytes
        lease = hog.reserve_static(size_bytes + page_bytes, "test")
        device.send(ActivateEngine(model=model), engine)
        assert device.wait_for(ActivationFailed, engine).missing_bytes <= page_bytes
        lease.release()
        lease = hog.reserve_static(size_bytes, "test")
        device.activate(model, engine)
        (item,) = long_requests(subject, model, count=1, seed=3)
        assert len(serve(device, engine, [item])[0]) == item.sampling.max_tokens


def test_a_limit_below_one_request_is_refused(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    model = subject.models[0]
    device.send(ActivateEngine(model=model, kv_limit_bytes=subject.page_bytes), engine)
    failed = device.wait_for(ActivationFailed, engine)
    assert failed.missing_bytes == 0
    assert "limit" in failed.message
    usage = device.client_usage(engine)
    assert usage is not None
    assert (usage.static_bytes, usage.min_bytes, usage.reserved_bytes) == (0, 0, 0)


def test_a_limit_holds_and_can_be_lifted(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    model = subject.models[0]
    reserve_bytes = device.activate(model, engine).reserve_bytes
    device.send(SetLimit(reserve_bytes), engine)
    requests = long_requests(subject, model, count=6, seed=4)
    start = len(device.statuses)
    limited = serve(device, engine, requests)
    assert peak_mapped_bytes(device, engine, start) <= reserve_bytes

    device.send(SetLimit(None), engine)
    trim_all(device, engine)
    start = len(device.statuses)
    again = [request(next(_ids), model.name, r.prompt_ids, r.sampling.max_tokens) for r in requests]
    assert serve(device, engine, again) == limited
    assert peak_mapped_bytes(device, engine, start) > reserve_bytes


def test_two_engines_at_the_limit_of_the_device_finish_everything(
    device: DeviceUnderTest, engine: str, second_engine: str, subject: Subject
) -> None:
    pairs = list(zip((engine, second_engine), subject.models, strict=True))
    batches, quanta_bytes = {}, []
    for name, model in pairs:
        quanta_bytes.append(device.activate(model, name).quantum_bytes)
        batches[name] = long_requests(subject, model, count=14, seed=5)
        subject.learn(device, name, batches[name])
        trim_all(device, name)
    start = len(device.statuses)
    for name, _ in pairs:
        device.send(Submit(batches[name]), name)
    everything = [r.id for batch in batches.values() for r in batch]
    tightest_bytes = min(free_bytes_while(device, everything))
    for requests in batches.values():
        outputs = [device.stream(r.id).token_ids for r in requests]
        assert outputs == [subject.expected(r) for r in requests]
    assert all(peak_mapped_bytes(device, name, start) > 0 for name, _ in pairs)
    assert tightest_bytes < max(quanta_bytes)


def test_an_engine_waits_for_room_without_spinning(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    """Takes all memory but the reserve: requests queue up, run one after another, and all end. Then
    memory is freed without a notice while they wait."""
    model = subject.models[0]
    reserve_bytes = device.activate(model, engine).reserve_bytes
    requests = long_requests(subject, model, count=4, seed=6)
    subject.learn(device, engine, requests)
    trim_all(device, engine)
    with device.memory.client("hog") as hog:
        lease = hog.reserve_static(device.memory.usage().free_bytes, "test")
        start = len(device.statuses)
        device.send(Submit(requests), engine)
        device.finish(requests[0].id, timeout_s=240.0)
        assert peak_mapped_bytes(device, engine, start) <= reserve_bytes
        lease.release()
        streams = device.finish(*(r.id for r in requests), timeout_s=240.0)
    assert [s.token_ids for s in streams] == [subject.expected(r) for r in requests]


def test_an_idle_engine_hardly_computes(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    """Compares CPU time with wall time, so that a loaded machine does not matter."""
    psutil = pytest.importorskip("psutil")
    device.activate(subject.models[0], engine)
    process = psutil.Process(device.pids[engine])
    device.settled_status(lambda s: s.running == 0, engine)
    before_s = sum(process.cpu_times()[:2])
    for _ in range(3):
        device.fresh_status(engine)
    # A status arrives at least once a second, so this took between two and three seconds.
    assert sum(process.cpu_times()[:2]) - before_s < 0.3


def test_deactivation_returns_every_byte(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    free_bytes = device.memory.usage().free_bytes
    model = subject.models[1]
    device.activate(model, engine)
    serve(device, engine, long_requests(subject, model, count=4, seed=7))
    device.send(Deactivate(), engine)
    device.wait_for(Deactivated, engine)
    assert device.memory.usage().free_bytes == free_bytes
    assert device.memory.resident_bytes() == 0
    usage = device.client_usage(engine)
    assert usage == kvcached.ClientUsage(
        *(engine, device.pids[engine], 0, 0, 0, 0, None, usage.maps, usage.unmaps),
        number=usage.number,
    )
    last = device.statuses[-1]
    assert last.model == model.name
    assert (last.maps_total, last.unmaps_total) == (usage.maps, usage.unmaps)
