"""Engines of two ranks, each with memory on its own device: both take a step, or neither does."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

import kvcached
from prism.engines.fake import expected_tokens
from prism.messages.engine import (
    ActivateEngine,
    ActivationFailed,
    Deactivate,
    Deactivated,
    Export,
    Exported,
    Submit,
)
from tests.engines.harness import DeviceUnderTest, request
from tests.engines.subjects import Shape, fake_subject, model_spec

PEER = "host:1"
PAGE = 64 << 10
MODEL = model_spec("a", Shape("Plain", 2, 2, 32, 1 << 20), context_length=512)
ODD = model_spec("odd", Shape("Odd", 2, 3, 32, 1 << 20), context_length=512)


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceUnderTest]:
    subject = fake_subject()
    with tempfile.TemporaryDirectory(prefix="prism-") as directory:
        config = subject.config(Path(directory), f"t{uuid4().hex[:10]}")
        [first] = config.devices
        pair = [first, msgspec.structs.replace(first, name=PEER)]
        config = msgspec.structs.replace(config, devices=pair)
        device = DeviceUnderTest("fake", config, subject.environment)
        yield device
        device.close()
        kvcached.Device.unlink(config.namespace, PEER)


@pytest.fixture
def peer(device: DeviceUnderTest) -> kvcached.Device:
    place = device.config.device(PEER)
    return kvcached.Device.open(
        PEER,
        capacity_bytes=place.capacity_bytes,
        page_bytes=place.page_bytes,
        namespace=device.config.namespace,
    )


@pytest.fixture
def engine(device: DeviceUnderTest) -> Iterator[str]:
    engine_id = f"e{uuid4().hex[:6]}"
    device.fork(engine_id, (PEER,))
    yield engine_id
    if engine_id in device.pids:
        device.end(engine_id)


def rank_of(device: kvcached.Device, engine: str) -> kvcached.ClientUsage:
    [usage] = [c for c in device.usage().clients if c.name == f"{engine}.1"]
    return usage


def serve(device: DeviceUnderTest, engine: str, prompts: list[list[int]], tokens: int) -> None:
    """Asserts that every output is right."""
    items = [request(f"{uuid4().hex}", MODEL.name, prompt, tokens) for prompt in prompts]
    device.send(Submit(items), engine)
    streams = device.finish(*(item.id for item in items))
    outputs = [stream.token_ids for stream in streams]
    assert outputs == [expected_tokens(prompt, tokens) for prompt in prompts]


def test_each_rank_holds_its_part(
    device: DeviceUnderTest, peer: kvcached.Device, engine: str
) -> None:
    activated = device.activate(MODEL, engine)
    mine, theirs = device.client_usage(engine), rank_of(peer, engine)
    assert mine is not None
    assert mine.static_bytes == theirs.static_bytes == activated.static_bytes
    assert theirs.static_bytes == MODEL.weight_bytes // 2 + (1 << 20)
    serve(device, engine, [[1, 2, 3], list(range(10, 90))], 40)
    device.send(Deactivate(), engine)
    device.end(engine)
    assert peer.usage().reserved_bytes == 0
    assert peer.resident_bytes() == 0


def test_where_ranks_met_is_removed_with_a_killed_engine(
    device: DeviceUnderTest, engine: str
) -> None:
    folder = Path(device.config.run_dir) / f"ranks-{engine}"
    assert folder.is_dir()
    os.kill(device.pids[engine], signal.SIGKILL)
    device.exited(engine)
    assert not folder.exists()


def test_a_rank_without_room_holds_all_back_for_a_step_only(
    device: DeviceUnderTest, peer: kvcached.Device, engine: str
) -> None:
    """Fills one device: its rank's map fails, no rank computes the step, and requests continue one
    after another in the guaranteed room, with the right output."""
    device.activate(MODEL, engine)
    with peer.client("thief") as thief:
        loot = thief.alloc_virtual_tensor(free := peer.usage().free_bytes // PAGE * PAGE)
        loot.map(0, free)
        prompts = [[seed, *range(20, 100)] for seed in range(12)]
        serve(device, engine, prompts, 60)
        assert device.fresh_status(engine).retractions_total > 0
        thief.free_virtual_tensor(loot)
    serve(device, engine, [[5, 5, 5]], 4)


def test_one_rank_without_room_fails_the_activation_on_all(
    device: DeviceUnderTest, peer: kvcached.Device, engine: str
) -> None:
    with peer.client("thief") as thief:
        lease = thief.reserve_static(peer.usage().free_bytes, "loot")
        device.send(ActivateEngine(model=MODEL), engine)
        failed = device.wait_for(ActivationFailed, engine)
        assert failed.missing_bytes > 0
        assert failed.message.startswith("rank 1: ")
        assert device.memory.usage().reserved_bytes == 0
        lease.release()
    device.activate(MODEL, engine)
    serve(device, engine, [[1, 2, 3]], 8)


def test_heads_that_do_not_divide_are_refused(device: DeviceUnderTest, engine: str) -> None:
    device.send(ActivateEngine(model=ODD), engine)
    failed = device.wait_for(ActivationFailed, engine)
    assert "3 KV heads cannot be shared by 2 ranks" in failed.message
    device.activate(MODEL, engine)


def test_what_a_rank_is_asked_for_goes_on_all(
    device: DeviceUnderTest, peer: kvcached.Device, engine: str
) -> None:
    """Shrinks the cache of both ranks, whichever device is short; the remaining prefixes are
    found."""
    device.activate(MODEL, engine)
    prompts = [[seed, *range(10, 400)] for seed in range(3)]
    serve(device, engine, prompts, 8)
    before = device.client_usage(engine)
    assert before is not None
    peer.shrink(f"{engine}.1", None, wait_s=10.0)
    shrunk = before.committed_bytes

    def is_less() -> bool:
        device.fresh_status(engine)
        mine = device.client_usage(engine)
        assert mine is not None
        return mine.committed_bytes == rank_of(peer, engine).committed_bytes < shrunk

    deadline_s = time.monotonic() + 20
    while not is_less():
        assert time.monotonic() < deadline_s
    serve(device, engine, prompts, 8)


def killed_rank(device: DeviceUnderTest, engine: str) -> int:
    """Kills the process of rank 1; returns its pid."""
    folder = Path(f"/proc/{device.pids[engine]}/task/{device.pids[engine]}/children")
    [child] = folder.read_text().split()
    os.kill(int(child), signal.SIGKILL)
    return int(child)


@pytest.mark.parametrize("who", ["rank 0", "rank 1"])
def test_a_dead_rank_ends_the_engine(
    device: DeviceUnderTest, peer: kvcached.Device, engine: str, who: str
) -> None:
    device.activate(MODEL, engine)
    item = request(uuid4().hex, MODEL.name, [1, 2, 3], 400)
    device.send(Submit([item]), engine)
    device.wait_until(lambda: len(device.stream(item.id).token_ids) > 3)
    if who == "rank 0":
        os.kill(device.pids[engine], signal.SIGKILL)
    else:
        killed_rank(device, engine)
    assert device.exited(engine).status != 0
    deadline_s = time.monotonic() + 20
    while device.memory.usage().reserved_bytes or peer.usage().reserved_bytes:
        device.memory.reap()
        peer.reap()
        assert time.monotonic() < deadline_s
    if who == "rank 1":
        [failed] = device.finish(item.id)
        assert failed.failure is not None
        assert failed.failure.retryable


def test_sampled_tokens_are_the_same_on_all_ranks() -> None:
    """Requests without a seed get one before the ranks see them."""
    from prism.engines.processes.rank_leader import _seeded

    item = request("r", MODEL.name, [1, 2], 4, temperature=1.0)
    seeded = _seeded(item)
    assert seeded.sampling.seed is not None
    assert _seeded(seeded) is seeded


@pytest.mark.parametrize("fault", ["", "a rank is killed"])
def test_requests_move_with_each_ranks_part(
    device: DeviceUnderTest, peer: kvcached.Device, engine: str, fault: str
) -> None:
    """Moves to an engine on the same devices, rank by rank: only the last block is computed again.
    With a part missing on one rank, all of it is computed again on all."""
    second = f"e{uuid4().hex[:6]}"
    device.fork(second, (PEER,))
    for name in (engine, second):
        device.activate(MODEL, name)
    items = [request(uuid4().hex, MODEL.name, [seed, *range(10, 60)], 80) for seed in range(3)]
    device.send(Submit(items), engine)
    device.wait_until(lambda: all(len(device.stream(i.id).token_ids) > 4 for i in items))
    device.send(Export((device.memory.name, PEER)), engine)
    moved = device.wait_for(Exported, engine).requests
    came = [
        item.resume.kv_tokens for item in moved if item.resume and len(item.resume.kv_offers) == 2
    ]
    assert len(came) == len(moved) > 0
    if fault:
        os.kill(rank_of(peer, engine).pid, signal.SIGKILL)
        device.send(Submit(moved), second)
        assert device.exited(engine).status != 0
    else:
        device.send(Submit(moved), second)
        device.send(Deactivate(), engine)
        device.wait_for(Deactivated, engine)
        assert rank_of(peer, engine).committed_bytes == 0
    streams = device.finish(*(item.id for item in items))
    assert [s.token_ids for s in streams] == [expected_tokens(i.prompt_ids, 80) for i in items]
    assert device.fresh_status(second).imported_tokens_total == (0 if fault else sum(came))
    device.end(second)
