"""Memory that one client needs and others can spare, between processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from kvcached import ClientUsage, Demand, Device, Holder, NoRoomError, errors

from .conftest import CAPACITY, EVERY_DEVICE, PAGE, TINY, Spawn

pytestmark = EVERY_DEVICE

QUANTUM = TINY.quantum_bytes(PAGE)
SLAB_BLOCKS = TINY.slab_tokens(PAGE) // TINY.block_tokens
ALL_BLOCKS = CAPACITY // QUANTUM * SLAB_BLOCKS
WAIT_S = 60.0


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ready(*processes: subprocess.Popen[str]) -> None:
    assert [line(p) for p in processes] == ["ready"] * len(processes)


def usage_of(device: Device, name: str) -> ClientUsage:
    return next(c for c in device.usage().clients if c.name == name)


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_an_idle_engine_is_woken_and_gives_its_spares_first(device: Device, spawn: Spawn) -> None:
    half = ALL_BLOCKS // 2
    cached, spare = spawn("shrink", "cached", half), spawn("shrink", "spare", 0, 0, half)
    ready(cached, spare)
    assert device.usage().free_bytes == 0
    with device.client("waiter", background=False) as client:
        kv = client.alloc_kvcache(TINY, 1 << 18, reserved_blocks=0)
        assert kv.alloc_kv(half) is None
        ids = kv.alloc_kv(half, wait_s=WAIT_S)
        assert ids is not None
        assert len(ids) == half
        assert line(spare) == f"gave {CAPACITY // 2} 0"
        assert usage_of(device, "cached").given_bytes == 0
        more = kv.alloc_kv(10 * SLAB_BLOCKS, wait_s=WAIT_S)
        assert more is not None
        tokens = 10 * SLAB_BLOCKS * TINY.block_tokens
        assert line(cached) == f"gave {10 * QUANTUM} {tokens}"
        found = usage_of(device, "cached")
        assert (found.evicted_tokens, found.evicted_bytes) == (tokens, 10 * QUANTUM)
        assert found.evicted_bytes_per_token == TINY.token_bytes


def test_a_static_lease_waits_as_well(device: Device, spawn: Spawn) -> None:
    ready(spawn("shrink", "cached", ALL_BLOCKS))
    with device.client("waiter", background=False) as client:
        with pytest.raises(NoRoomError):
            client.reserve_static(PAGE, "weights")
        lease = client.reserve_static(CAPACITY // 2, "weights", wait_s=WAIT_S)
        assert client.usage().static_bytes == CAPACITY // 2
        lease.release()
        with pytest.raises(NoRoomError):
            client.reserve_static(CAPACITY + PAGE, "too much", wait_s=0.05)


def test_several_waiters_are_served_and_nobody_is_asked_twice(device: Device, spawn: Spawn) -> None:
    holders = [spawn("shrink", f"holder-{n}", ALL_BLOCKS // 2) for n in range(2)]
    ready(*holders)
    slabs = [3, 5, 7, 11]
    waiters = [
        spawn("wait_for_blocks", f"waiter-{n}", count * SLAB_BLOCKS, WAIT_S)
        for n, count in enumerate(slabs)
    ]
    ready(*waiters)
    assert [line(w) for w in waiters] == [f"got {count * SLAB_BLOCKS}" for count in slabs]
    assert device.usage().free_bytes == 0

    def given_bytes() -> int:
        return sum(usage_of(device, f"holder-{n}").given_bytes for n in range(2))

    wait_until(lambda: given_bytes() == sum(slabs) * QUANTUM)


def test_it_waits_in_vain_for_a_stopped_process_and_asks_another(
    device: Device, spawn: Spawn
) -> None:
    frozen, awake = spawn("shrink", "frozen", ALL_BLOCKS * 3 // 4), spawn("shrink", "awake", 64)
    ready(frozen, awake)
    os.kill(frozen.pid, signal.SIGSTOP)
    with device.client("waiter", background=False) as client:
        kv = client.alloc_kvcache(TINY, 1 << 18, reserved_blocks=0)
        rest = kv.alloc_kv(kv.available_blocks())
        assert rest is not None
        ids = kv.alloc_kv(SLAB_BLOCKS, wait_s=1.0)
        assert ids is not None
        assert line(awake).startswith("gave")
        started_s = time.monotonic()
        assert kv.alloc_kv(ALL_BLOCKS // 4, wait_s=0.3) is None
        assert time.monotonic() - started_s >= 0.3
        assert client.usage().name == "waiter"
        # Once it resumes it gives memory, whether the request is still open or not.
        os.kill(frozen.pid, signal.SIGCONT)
        assert kv.alloc_kv(ALL_BLOCKS // 4, wait_s=WAIT_S) is not None


def test_what_a_killed_process_held_reaches_the_waiter(device: Device, spawn: Spawn) -> None:
    doomed = spawn("shrink", "doomed", 0, ALL_BLOCKS)
    ready(doomed)
    with device.client("waiter", background=False) as client:
        kv = client.alloc_kvcache(TINY, 1 << 18, reserved_blocks=0)
        killer = threading.Timer(0.05, doomed.kill)
        killer.start()
        assert kv.alloc_kv(ALL_BLOCKS // 2, wait_s=WAIT_S) is not None
        killer.join()


def test_a_limit_that_another_process_lowers_makes_its_client_shrink(
    device: Device, spawn: Spawn
) -> None:
    target = spawn("shrink", "target", 40 * SLAB_BLOCKS, 8 * SLAB_BLOCKS, 16 * SLAB_BLOCKS)
    ready(target)
    device.set_limit("target", 60 * QUANTUM)
    assert line(target) == f"gave {16 * QUANTUM} 0"
    device.set_limit("target", 20 * QUANTUM)
    assert line(target).startswith(f"gave {28 * QUANTUM}")
    assert usage_of(device, "target").reserved_bytes == 20 * QUANTUM
    device.set_limit("target", 0)
    assert line(target).startswith(f"gave {12 * QUANTUM}")  # memory of requests stays
    assert usage_of(device, "target").reserved_bytes == 8 * QUANTUM


def test_what_comes_free_goes_to_those_who_wait(device: Device, spawn: Spawn) -> None:
    """Denies it to other clients that ask meanwhile, such as the one that freed it."""
    with device.client("greedy", background=False) as client:
        kv = client.alloc_kvcache(TINY, 1 << 18, reserved_blocks=0)
        ids = kv.alloc_kv(ALL_BLOCKS)
        assert ids is not None
        waiter = spawn("wait_for_blocks", "waiter", 8 * SLAB_BLOCKS, WAIT_S)
        ready(waiter)
        wait_until(lambda: client.usage().asked_bytes or _waits(device))
        for first in range(0, 8 * SLAB_BLOCKS, SLAB_BLOCKS):
            kv.free_kv(ids[first : first + SLAB_BLOCKS])
            assert kv.alloc_kv(SLAB_BLOCKS) is None or first == 7 * SLAB_BLOCKS
        assert line(waiter) == f"got {8 * SLAB_BLOCKS}"


def _waits(device: Device) -> bool:
    from kvcached import _core

    clients = _core.balloon_view(device._open_ledger()).clients
    return any(c.wanted_since for c in clients)


def test_another_policy_is_asked(device: Device, spawn: Spawn) -> None:
    half = ALL_BLOCKS // 2
    spare, cached = spawn("shrink", "spare", 0, 0, half), spawn("shrink", "cached", half)
    ready(spare, cached)
    seen: list[tuple[int, list[str]]] = []

    def caches_only(missing_bytes: int, holders: Sequence[Holder]) -> list[Demand]:
        seen.append((missing_bytes, sorted(h.name for h in holders)))
        return [Demand(h, missing_bytes) for h in holders if h.evictable_bytes]

    with device.client("waiter", shrink_policy=caches_only, background=False) as client:
        kv = client.alloc_kvcache(TINY, 1 << 18, reserved_blocks=0)
        assert kv.alloc_kv(4 * SLAB_BLOCKS, wait_s=WAIT_S) is not None
    assert seen[0] == (4 * QUANTUM, ["cached", "spare"])
    assert line(cached).startswith(f"gave {4 * QUANTUM}")
    assert usage_of(device, "spare").given_bytes == 0


def test_waits_that_cannot_succeed_end_in_time_and_harm_no_client(device: Device) -> None:
    with (
        device.client("a", limit_bytes=4 * QUANTUM, background=False) as a,
        device.client("b", background=False) as b,
    ):
        kv = a.alloc_kvcache(TINY, 1 << 12, reserved_blocks=0)
        assert kv.alloc_kv(kv.num_blocks + 1, wait_s=WAIT_S) is None  # no such addresses
        assert kv.alloc_kv(5 * SLAB_BLOCKS, wait_s=0.05) is None  # its limit
        other = b.alloc_kvcache(TINY, 1 << 18, reserved_blocks=0)
        assert other.alloc_kv(ALL_BLOCKS) is not None
        for wait_s in (-1, float("nan"), 1e9):
            with pytest.raises(errors.InvalidArgumentError, match="wait_s is"):
                kv.alloc_kv(kv.num_blocks, wait_s=wait_s)
        with pytest.raises(errors.InvalidArgumentError, match="must be a number"):
            kv.alloc_kv(kv.num_blocks, wait_s="1")  # type: ignore[arg-type]


def test_a_step_asks_for_next_to_nothing(device: Device) -> None:
    with device.client("a") as client:
        assert client.shrink_request() is None
        assert client.answer_requests() is None
        order = device.order_shrink("a", 5, wait_s=WAIT_S)
        assert order.poll() is None
        request = client.shrink_request()
        assert request is not None
        assert request.size_bytes == 5
        assert client.shrink_request() == request  # until it is answered
        assert client.usage().asked_bytes == 5
        assert client.answer_requests() is not None
        (answer,) = order.wait()
        assert (answer.outcome, answer.returned_bytes, answer.asked_bytes) == ("answered", 0, 5)
        assert client.usage().asked_bytes == 0
    with pytest.raises(errors.ClosedError):
        client.shrink_request()
    with pytest.raises(errors.ClosedError):
        client.fileno()


def test_asks_that_add_up_beyond_every_size_are_one_request(device: Device) -> None:
    largest = 2**63 - 1
    with device.client("a") as client:
        orders = [device.order_shrink("a", largest, wait_s=WAIT_S) for _ in range(2)]
        request = client.shrink_request()
        assert request is not None
        assert request.size_bytes == largest
        assert client.answer_requests() is not None
        assert [[answer.outcome for answer in order.wait()] for order in orders] == [
            ["answered"],
            ["answered"],
        ]


def test_orders_say_what_became_of_each(device: Device, spawn: Spawn) -> None:
    answering = spawn("shrink", "answering", 8 * SLAB_BLOCKS, 0, 2 * SLAB_BLOCKS)
    stopped, doomed = spawn("shrink", "stopped", 8), spawn("shrink", "doomed", 8)
    ready(answering, stopped, doomed)
    for process in (stopped, doomed):
        os.kill(process.pid, signal.SIGSTOP)
    order = device.order_shrink(wait_s=0.5)
    doomed.kill()
    doomed.wait()
    found = {answer.name: answer for answer in order.wait()}
    assert {name: a.outcome for name, a in found.items()} == {
        "answering": "answered",
        "stopped": "no answer",
        "doomed": "gone",
    }
    assert found["answering"].returned_bytes == 10 * QUANTUM
    assert found["answering"].evicted_tokens == 8 * SLAB_BLOCKS * TINY.block_tokens
    with pytest.raises(errors.UnknownClientError, match=r"clients: .*answering"):
        device.shrink("nobody")
    with pytest.raises(errors.InvalidArgumentError, match="size_bytes is 0"):
        device.shrink("answering", 0)


def test_room_can_be_asked_for_on_behalf_of_another(device: Device, spawn: Spawn) -> None:
    target = spawn("shrink", "target", 8 * SLAB_BLOCKS)
    other = spawn("shrink", "other", 8 * SLAB_BLOCKS)
    ready(target, other)
    for _ in range(5):  # pending requests are not repeated
        device.request_room(3 * QUANTUM, for_client="other", within_s=WAIT_S)
    assert line(target).startswith(f"gave {3 * QUANTUM}")
    assert usage_of(device, "other").given_bytes == 0


def test_a_forked_child_answers_for_nobody(device: Device) -> None:
    if device.name != "host:0":
        pytest.skip("a process that used CUDA does not fork")
    with device.client("parent") as client:
        descriptor = client.fileno()
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (client.shrink_request, client.fileno):
                try:
                    call()
                except errors.ForkedClientError:
                    refused += 1
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        order = device.order_shrink("parent", wait_s=WAIT_S)
        assert select.select([descriptor], [], [], WAIT_S)[0] == [descriptor]
        client.answer_requests()
        assert select.select([descriptor], [], [], 0)[0] == []
        assert order.wait()[0].outcome == "answered"
