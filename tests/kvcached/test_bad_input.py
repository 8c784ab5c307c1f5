"""Bad input: a named exception that says what to change, and no change of state.

One row for each mistake. Mistakes that need a mount, another user, a damaged file or another driver
are in other files. test_device.py has a full shared memory, a segment without permission and one of
another library version. test_cuda.py has a missing GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kvcached import Client, Device, KVCache, Shrunk, VirtualTensor, errors
from kvcached.device import SHM_DIR

from .conftest import CAPACITY, EVERY_DEVICE, PAGE, TINY

ADDRESS_SPACE = 1 << 57
HUGE = 1 << 70
HEADS = replace(TINY, num_kv_heads=1 << 40, head_dim=1 << 20)
WIDE = replace(TINY, num_kv_heads=1 << 62, head_dim=1 << 62)


@dataclass
class Room:
    """Objects for a mistake: a live cache, a half-mapped tensor, and another cache."""

    device: Device
    client: Client
    kv: KVCache
    other: KVCache
    tensor: VirtualTensor
    ids: Any
    other_ids: Any

    def open(self, name: str | None = None, **wanted: int) -> Device:
        """Opens `name`, or another device, in the same namespace."""
        room = {"capacity_bytes": CAPACITY, "page_bytes": PAGE, **wanted}
        return Device.open(name or "host:3", namespace=self.device.namespace, **room)

    def state(self) -> tuple[object, ...]:
        caches = [
            (kv.live_blocks(), kv.mapped_bytes(), kv.available_blocks(), kv.counters())
            for kv in (self.kv, self.other)
        ]
        files = sorted(SHM_DIR.glob(f"*{self.device.namespace}*"))
        return self.device.usage(), *caches, self.tensor.mapped_bytes, files


@pytest.fixture
def room(device: Device) -> Iterator[Room]:
    room_bytes = {"min_bytes": PAGE, "limit_bytes": CAPACITY // 2}
    with device.client("test", background=False, **room_bytes) as client:
        kv, other = (client.alloc_kvcache(TINY, 1 << 12) for _ in range(2))
        tensor = client.alloc_virtual_tensor(4 * PAGE)
        tensor.map(0, 2 * PAGE)
        ids, other_ids = kv.alloc_kv(4), other.alloc_kv(9)
        yield Room(device, client, kv, other, tensor, ids, other_ids)
        kv.check_integrity()
        other.check_integrity()


def free(kv: KVCache, *ids: int) -> None:
    kv.free_kv(np.array(ids, dtype=np.int64))


Mistake = tuple[str, Callable[[Room], object], type[errors.KvcachedError], str]
INVALID, UNALIGNED = errors.InvalidArgumentError, errors.AlignmentError

MISTAKES: list[Mistake] = [
    # no multiple of the granularity
    ("capacity, unaligned", lambda r: r.open(capacity_bytes=PAGE + 1), UNALIGNED, "multiple"),
    ("page, unaligned", lambda r: r.open(page_bytes=PAGE + 1), UNALIGNED, "multiple"),
    (
        "tensor, unaligned",
        lambda r: r.client.alloc_virtual_tensor(PAGE + 1),
        UNALIGNED,
        "multiple",
    ),
    ("map size, unaligned", lambda r: r.tensor.map(2 * PAGE, 1), UNALIGNED, "multiple"),
    ("map offset, unaligned", lambda r: r.tensor.map(1, PAGE), UNALIGNED, "multiple"),
    ("unmap size, unaligned", lambda r: r.tensor.unmap(0, PAGE + 1), UNALIGNED, "multiple"),
    # zero
    ("capacity, 0", lambda r: r.open(capacity_bytes=0), INVALID, "must be from 1"),
    ("page, 0", lambda r: r.open(page_bytes=0), INVALID, "must be from 1"),
    ("tensor, 0", lambda r: r.client.alloc_virtual_tensor(0), INVALID, "must be from 1"),
    ("map size, 0", lambda r: r.tensor.map(0, 0), INVALID, "must be from 1"),
    ("unmap size, 0", lambda r: r.tensor.unmap(0, 0), INVALID, "must be from 1"),
    ("tokens, 0", lambda r: r.client.alloc_kvcache(TINY, 0), INVALID, "must be from 1"),
    ("static, 0", lambda r: r.client.reserve_static(0, "x"), INVALID, "must be from 1"),
    # negative
    ("capacity, negative", lambda r: r.open(capacity_bytes=-PAGE), INVALID, "must be from 1"),
    ("page, negative", lambda r: r.open(page_bytes=-PAGE), INVALID, "must be from 1"),
    ("tensor, negative", lambda r: r.client.alloc_virtual_tensor(-PAGE), INVALID, "must be from 1"),
    ("map size, negative", lambda r: r.tensor.map(0, -PAGE), INVALID, "must be from 1"),
    ("map offset, negative", lambda r: r.tensor.map(-PAGE, PAGE), INVALID, "must be from 0"),
    ("tokens, negative", lambda r: r.client.alloc_kvcache(TINY, -1), INVALID, "must be from 1"),
    (
        "reserved blocks, negative",
        lambda r: r.client.alloc_kvcache(TINY, 9, reserved_blocks=-1),
        INVALID,
        "must be from 0",
    ),
    ("blocks, negative", lambda r: r.kv.alloc_kv(-1), INVALID, "negative"),
    ("static, negative", lambda r: r.client.reserve_static(-1, "x"), INVALID, "must be from 1"),
    ("limit, negative", lambda r: r.client.set_limit(-1), INVALID, "must be from 0"),
    ("given back, negative", lambda r: Shrunk(-1), INVALID, "returned_bytes .*must be from 0"),
    ("minimum, negative", lambda r: r.client.set_min(-1), INVALID, "must be from 0"),
    ("premapped, negative", lambda r: r.kv.set_premapped_pages(-1, 1), INVALID, "must be from 0"),
    ("spares, negative", lambda r: r.kv.set_spare_pages(0, -1), INVALID, "must be from 0"),
    # beyond the address space
    ("capacity, huge", lambda r: r.open(capacity_bytes=HUGE), INVALID, "must be from 1"),
    ("page, huge", lambda r: r.open(page_bytes=HUGE), INVALID, "must be from 1"),
    (
        "page, above the capacity",
        lambda r: r.open(page_bytes=2 * CAPACITY),
        INVALID,
        "below one page",
    ),
    (
        "tensor, above the address space",
        lambda r: r.client.alloc_virtual_tensor(ADDRESS_SPACE),
        errors.KvcachedError,
        "ask for less",
    ),
    ("tensor, huge", lambda r: r.client.alloc_virtual_tensor(HUGE), INVALID, "must be from 1"),
    ("map size, huge", lambda r: r.tensor.map(0, HUGE), INVALID, "must be from 1"),
    (
        "map beyond the end",
        lambda r: r.tensor.map(3 * PAGE, 2 * PAGE),
        INVALID,
        "outside the tensor of 262144 bytes",
    ),
    (
        "unmap beyond the end",
        lambda r: r.tensor.unmap(0, 8 * PAGE),
        INVALID,
        "outside the tensor of 262144 bytes",
    ),
    (
        "tokens, above the address space",
        lambda r: r.client.alloc_kvcache(TINY, ADDRESS_SPACE // 64),
        errors.KvcachedError,
        "ask for less",
    ),
    ("heads, 2^64 bytes", lambda r: r.client.alloc_kvcache(HEADS, 1), INVALID, "ask for less"),
    ("heads, huge", lambda r: r.client.alloc_kvcache(WIDE, 1), INVALID, "ask for less"),
    ("tokens, huge", lambda r: r.client.alloc_kvcache(TINY, HUGE), INVALID, "must be from 1"),
    ("static, huge", lambda r: r.client.reserve_static(HUGE, "x"), INVALID, "must be from 1"),
    (
        "static, above the device",
        lambda r: r.client.reserve_static(ADDRESS_SPACE, "x"),
        errors.NoRoomError,
        "full",
    ),
    ("blocks, huge", lambda r: r.kv.alloc_kv(HUGE), INVALID, "num_blocks must be an integer"),
    # devices
    ("a device of no kind", lambda r: r.open("tpu:0"), errors.UnknownDeviceError, "'host:0'"),
    ("a device of no number", lambda r: r.open("cuda:x"), errors.UnknownDeviceError, "'host:0'"),
    (
        "a capacity below one page",
        lambda r: r.open(capacity_bytes=PAGE // 2),
        INVALID,
        "below one page of 65536",
    ),
    # blocks
    (
        "free twice in one call",
        lambda r: free(r.kv, r.ids[0], r.ids[0]),
        errors.DoubleFreeError,
        "free each id once",
    ),
    (
        "free what is free",
        lambda r: free(r.kv, r.ids[1], 200),
        errors.DoubleFreeError,
        "free each id once",
    ),
    (
        "free an unknown id",
        lambda r: free(r.kv, r.ids[1], 1 << 40),
        errors.UnknownBlockError,
        "has blocks 1 to",
    ),
    ("free a negative id", lambda r: free(r.kv, -1), errors.UnknownBlockError, "has blocks 1 to"),
    ("free the padding", lambda r: free(r.kv, 0), errors.UnknownBlockError, "reserved for"),
    (
        "free an id of another cache",
        lambda r: free(r.kv, r.ids[0], r.other_ids[8]),
        errors.DoubleFreeError,
        "not allocated",
    ),
    ("free a list", lambda r: r.kv.free_kv([1, 2]), INVALID, "1-D int64 array"),
    # ranges
    (
        "unmap what is not mapped",
        lambda r: r.tensor.unmap(2 * PAGE, PAGE),
        errors.NotMappedError,
        "not mapped",
    ),
    (
        "unmap more than is mapped",
        lambda r: r.tensor.unmap(PAGE, 2 * PAGE),
        errors.NotMappedError,
        "not mapped",
    ),
    (
        "map what is mapped",
        lambda r: r.tensor.map(PAGE, 2 * PAGE),
        errors.AlreadyMappedError,
        "unmap",
    ),
    # a limit below the minimum, a minimum above the limit
    ("limit below the minimum", lambda r: r.client.set_limit(0), INVALID, "min_bytes"),
    ("minimum above the limit", lambda r: r.client.set_min(CAPACITY), INVALID, "limit_bytes"),
    # no integers
    ("a float", lambda r: r.client.reserve_static(1.5, "x"), INVALID, "integer"),
    ("half a block", lambda r: r.kv.alloc_kv(2.5), INVALID, "integer"),
    ("a bool", lambda r: r.client.alloc_virtual_tensor(True), INVALID, "integer"),
]


@pytest.mark.parametrize(
    ("mistake", "error", "says"),
    [pytest.param(*row[1:], id=row[0]) for row in MISTAKES],
)
@EVERY_DEVICE
def test_a_mistake_is_named_and_changes_nothing(
    room: Room, mistake: Callable[[Room], object], error: type[Exception], says: str
) -> None:
    before = room.state()
    with pytest.raises(error, match=says):
        mistake(room)
    assert room.state() == before
