"""Several clients on one device: guarantees, limits, races and deaths."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcached import Device, NoRoomError, errors

from .arrays import as_array
from .conftest import CAPACITY, EVERY_DEVICE, PAGE, TINY, Spawn

pytestmark = EVERY_DEVICE

DEADLINE_S = 30


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().startswith(word)


def wait_free(device: Device, free_bytes: int) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while device.usage().free_bytes != free_bytes and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert device.usage().free_bytes == free_bytes


def test_a_client_borrows_what_another_leaves_but_not_its_minimum(device: Device) -> None:
    quantum = TINY.quantum_bytes(PAGE)
    a_room = {"min_bytes": CAPACITY // 4, "background": False}
    with device.client("a", **a_room) as a, device.client("b", background=False) as b:
        kv_a = a.alloc_kvcache(TINY, 1 << 18, reserved_blocks=0)
        kv_b = b.alloc_kvcache(TINY, 1 << 18, reserved_blocks=0)
        per_quantum = TINY.slab_tokens(PAGE) // TINY.block_tokens
        assert kv_b.available_blocks() == CAPACITY * 3 // 4 // quantum * per_quantum
        ids = kv_b.alloc_kv(kv_b.available_blocks())
        assert ids is not None
        assert kv_b.alloc_kv(1) is None
        assert not kv_b.can_alloc(1)
        assert kv_a.available_blocks() == CAPACITY // 4 // quantum * per_quantum
        assert kv_a.alloc_kv(kv_a.available_blocks()) is not None
        assert device.usage().free_bytes == 0
        kv_b.free_kv(ids)
        assert kv_a.available_blocks() == CAPACITY * 3 // 4 // quantum * per_quantum


def test_limits_go_down_and_up(device: Device) -> None:
    with device.client("a", limit_bytes=4 * PAGE) as client:
        tensor = client.alloc_virtual_tensor(8 * PAGE)
        with pytest.raises(NoRoomError, match="at its limit") as refused:
            tensor.map(0, 5 * PAGE)
        assert (refused.value.need_bytes, refused.value.free_bytes) == (5 * PAGE, 4 * PAGE)
        tensor.map(0, 4 * PAGE)
        client.set_limit(2 * PAGE)
        tensor.unmap(0, PAGE)
        with pytest.raises(NoRoomError):
            tensor.map(0, PAGE)
        client.set_limit(None)
        tensor.map(0, PAGE)
        assert client.usage().limit_bytes is None
        with pytest.raises(errors.InvalidArgumentError, match="limit_bytes is -1"):
            client.set_limit(-1)


def test_static_memory_is_leased_first(device: Device) -> None:
    with device.client("a") as client:
        lease = client.reserve_static(CAPACITY - PAGE, "weights")
        tensor = client.alloc_virtual_tensor(2 * PAGE)
        with pytest.raises(NoRoomError, match="the device is full"):
            tensor.map(0, 2 * PAGE)
        with pytest.raises(NoRoomError):
            client.reserve_static(2 * PAGE, "more")
        assert device.usage().static_bytes == CAPACITY - PAGE
        lease.release()
        lease.release()
        tensor.map(0, 2 * PAGE)
        assert client.usage().static_bytes == 0


def test_usage_adds_up(device: Device) -> None:
    with device.client("a", min_bytes=5 * PAGE) as a, device.client("b", limit_bytes=CAPACITY) as b:
        a.alloc_virtual_tensor(PAGE).map(0, PAGE)
        tensor = b.alloc_virtual_tensor(4 * PAGE)
        tensor.map(0, 4 * PAGE)
        tensor.unmap(PAGE, PAGE)
        b.reserve_static(100, "x")
        usage = device.usage()
        by_name = {client.name: client for client in usage.clients}
        assert by_name["b"].reserved_bytes == by_name["b"].committed_bytes == 3 * PAGE
        assert (by_name["b"].maps, by_name["b"].unmaps) == (1, 1)
        assert by_name["a"].min_bytes == 5 * PAGE
        assert usage.reserved_bytes == 5 * PAGE + 3 * PAGE + 100
        assert usage.reserved_bytes + usage.free_bytes == usage.capacity_bytes
    assert device.usage().free_bytes == CAPACITY


def start(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_eight_processes_never_over_commit(device: Device, spawn: Spawn) -> None:
    racers = [spawn("race", seed, 2000) for seed in range(8)]
    for racer in racers:
        wait_for(racer, "ready")
    for racer in racers:
        start(racer)
    with ThreadPoolExecutor(len(racers)) as waiters:
        racing = [waiters.submit(wait_for, racer, "done") for racer in racers]
        while not all(future.done() for future in racing):
            assert device.resident_bytes() <= CAPACITY
            time.sleep(0.005)
    assert device.usage().reserved_bytes > CAPACITY * 0.9
    assert device.resident_bytes() == device.usage().committed_bytes
    for racer in racers:
        start(racer)
    outcomes = [racer.communicate(timeout=DEADLINE_S)[0].split() for racer in racers]
    assert all(racer.returncode == 0 for racer in racers)
    assert all(int(granted) > 0 for granted, _ in outcomes)  # its minimum, if nothing else
    assert sum(int(refused) for _, refused in outcomes) > 0
    assert device.usage().free_bytes == CAPACITY
    assert device.resident_bytes() == 0


def test_killed_client_returns_its_pages(device: Device, device_name: str, spawn: Spawn) -> None:
    holder = spawn("hold", CAPACITY)
    wait_for(holder, "ready")
    assert device.resident_bytes() == CAPACITY
    with device.client("next") as client:
        tensor = client.alloc_virtual_tensor(CAPACITY)
        with pytest.raises(NoRoomError):
            tensor.map(0, PAGE)
        holder.kill()
        holder.wait()
        # No call reaps explicitly: a reservation without room does, 1 ms after the last one.
        time.sleep(0.001)
        tensor.map(0, CAPACITY)
        if device_name == "host:0":
            assert device.resident_bytes() == 0  # mapped, not yet touched
        as_array(tensor)[:] = 1
        assert device.resident_bytes() == CAPACITY
    assert device.resident_bytes() == 0


def test_available_blocks_sees_a_death(device: Device, spawn: Spawn) -> None:
    holder = spawn("hold", CAPACITY - TINY.quantum_bytes(PAGE))
    wait_for(holder, "ready")
    with device.client("next") as client:
        kv = client.alloc_kvcache(TINY, 1 << 16)
        assert not kv.can_alloc(100)
        holder.kill()
        holder.wait()
        assert kv.can_alloc(100)


def test_kills_at_any_moment_leave_the_capacity_whole(device: Device, spawn: Spawn) -> None:
    for seed in range(12):
        churner = spawn("churn", seed)
        wait_for(churner, "ready")
        time.sleep(0.003 * seed)
        churner.kill()
        churner.wait()
        wait_free(device, CAPACITY)
    assert device.resident_bytes() == 0
    assert device.reap() == 0
