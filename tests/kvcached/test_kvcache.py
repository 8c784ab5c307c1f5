from __future__ import annotations

import signal

import numpy as np
import pytest

from kvcached import Client, Device, KVCounters, NoRoomError, errors

from .arrays import as_array
from .conftest import CAPACITY, EVERY_DEVICE, PAGE, SMOL, TINY, Spawn

pytestmark = EVERY_DEVICE

BLOCKS_PER_SLAB = TINY.slab_tokens(PAGE) // TINY.block_tokens
QUANTUM = TINY.quantum_bytes(PAGE)


@pytest.fixture
def client(device: Device):  # type: ignore[no-untyped-def]
    with device.client("test", background=False) as opened:
        yield opened


def test_nothing_is_resident_but_the_floor(
    device: Device, device_name: str, client: Client
) -> None:
    kv = client.alloc_kvcache(TINY, 1 << 20, reserved_blocks=1)
    assert kv.num_tokens == 1 << 20
    # A host page is resident from its first touch, a GPU's from its creation.
    assert device.resident_bytes() == (0 if device_name == "host:0" else QUANTUM)
    assert kv.mapped_bytes() == kv.floor_bytes() == QUANTUM
    for layer in range(TINY.num_layers):
        as_array(kv.k_buffer(layer))[: TINY.block_tokens] = 1
    assert device.resident_bytes() <= kv.floor_bytes()
    client.free_kvcache(kv)
    bare = client.alloc_kvcache(TINY, 1000, reserved_blocks=0)
    assert bare.mapped_bytes() == bare.floor_bytes() == 0
    assert device.usage().free_bytes == CAPACITY


def test_integers_of_numpy_are_integers(device: Device) -> None:
    number = np.int64
    with device.client("numpy", min_bytes=number(0), limit_bytes=number(CAPACITY)) as client:
        kv = client.alloc_kvcache(TINY, number(1 << 20), reserved_blocks=number(0))
        assert kv.alloc_kv(number(1)) is not None
        assert kv.can_alloc(np.int32(1))
        assert kv.alloc_kv(number(kv.num_blocks - 1), wait_s=0.01) is None
        assert client.usage().limit_bytes == CAPACITY
        with pytest.raises(errors.InvalidArgumentError, match="must be an integer, not ndarray"):
            kv.can_alloc(np.arange(2))  # type: ignore[arg-type]


def test_memory_follows_blocks(device: Device, client: Client) -> None:
    kv = client.alloc_kvcache(SMOL, 4096)
    floor_bytes, slab_blocks = kv.floor_bytes(), SMOL.slab_tokens(PAGE) // SMOL.block_tokens
    ids = kv.alloc_kv(2 * slab_blocks)
    assert ids is not None
    assert ids.dtype == np.int64
    assert 0 not in ids
    assert kv.mapped_bytes() == 3 * floor_bytes
    rows = (ids[:, None] * SMOL.block_tokens + np.arange(SMOL.block_tokens)).ravel()
    for layer in range(SMOL.num_layers):
        as_array(kv.k_buffer(layer))[rows] = layer
        as_array(kv.v_buffer(layer))[rows] = -layer
    assert device.resident_bytes() >= len(rows) * SMOL.token_bytes
    assert device.resident_bytes() <= device.usage().committed_bytes
    assert (as_array(kv.v_buffer(29))[rows] == -29).all()
    kv.free_kv(ids)
    assert kv.mapped_bytes() == kv.floor_bytes()
    assert device.resident_bytes() <= kv.floor_bytes()
    assert kv.counters() == KVCounters(
        maps=120, unmaps=60, pages_mapped=60 * 3 * 3, pages_unmapped=60 * 3 * 2
    )


def test_freeing_makes_room_at_once(client: Client) -> None:
    kv = client.alloc_kvcache(TINY, 1 << 20, reserved_blocks=0)
    everything = kv.available_blocks()
    ids = kv.alloc_kv(everything)
    assert ids is not None
    assert kv.alloc_kv(1) is None
    assert kv.available_blocks() == 0
    kv.free_kv(ids[::2])  # strided, and no slab is empty
    assert kv.mapped_bytes() == CAPACITY
    assert kv.free_mapped_blocks() == kv.available_blocks() == everything // 2
    kv.free_kv(ids[1::2])
    assert kv.mapped_bytes() == 0
    kv.check_integrity()


def test_free_blocks_on_mapped_pages_cost_no_look_at_the_ledger(device: Device) -> None:
    with device.client("test", background=False) as client:
        kv = client.alloc_kvcache(TINY, 1 << 20, reserved_blocks=1)
        device.destroy(force=True)  # the ledger refuses all calls from here on
        mapped = kv.free_mapped_blocks()
        assert mapped > 0
        assert kv.can_alloc(mapped)
        with pytest.raises(errors.DeviceGoneError):
            kv.can_alloc(mapped + 1)


def test_virtual_space_is_a_bound_too(client: Client) -> None:
    kv = client.alloc_kvcache(TINY, 1, reserved_blocks=1)
    assert kv.num_blocks == BLOCKS_PER_SLAB
    assert kv.alloc_kv(BLOCKS_PER_SLAB) is None
    assert kv.alloc_kv(1 << 40) is None
    ids = kv.alloc_kv(BLOCKS_PER_SLAB - 1)
    assert sorted(ids) == list(range(1, BLOCKS_PER_SLAB))
    assert kv.alloc_kv(0).size == 0


def test_bad_frees_change_nothing(client: Client) -> None:
    kv = client.alloc_kvcache(TINY, 1 << 12)
    ids = kv.alloc_kv(4)
    other = client.alloc_kvcache(TINY, 1 << 12).alloc_kv(6)
    cases = [
        ([ids[0], ids[0]], errors.DoubleFreeError, "free each id once"),
        ([ids[0], other[5]], errors.DoubleFreeError, "not allocated"),
        ([ids[0], 0], errors.UnknownBlockError, "reserved for padding"),
        ([ids[0], -1], errors.UnknownBlockError, "blocks 1 to 255"),
        ([ids[0], kv.num_blocks], errors.UnknownBlockError, "does not belong to this KV cache"),
    ]
    for bad, error, says in cases:
        with pytest.raises(error, match=says):
            kv.free_kv(np.array(bad, dtype=np.int64))
        assert kv.live_blocks() == 4
    for wrong in (ids.astype(np.int32), ids.astype(np.float64), ids.reshape(2, 2), [1, 2], None):
        with pytest.raises(errors.InvalidArgumentError, match="1-D int64"):
            kv.free_kv(wrong)
    with pytest.raises(errors.InvalidArgumentError, match="negative"):
        kv.alloc_kv(-1)
    kv.free_kv(ids)
    with pytest.raises(errors.DoubleFreeError):
        kv.free_kv(ids)
    kv.check_integrity()


def test_bad_sizes(client: Client) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="num_tokens is 0"):
        client.alloc_kvcache(TINY, 0)
    with pytest.raises(errors.InvalidArgumentError, match="below the 8 blocks"):
        client.alloc_kvcache(TINY, 1, reserved_blocks=8)
    with pytest.raises(errors.InvalidArgumentError, match="larger pages"):
        client.alloc_kvcache(TINY, 1 << 36)
    with pytest.raises(errors.InvalidArgumentError, match="ask for less"):
        client.alloc_kvcache(TINY, 1 << 60)
    with pytest.raises(errors.InvalidArgumentError, match="layer 2 is not in"):
        client.alloc_kvcache(TINY, 100).k_buffer(2)
    blocker = client.reserve_static(CAPACITY - 2 * QUANTUM, "weights")
    with pytest.raises(NoRoomError, match="the device is full"):
        client.alloc_kvcache(TINY, 1 << 16, reserved_blocks=2 * BLOCKS_PER_SLAB + 1)
    blocker.release()


def test_spare_pages_are_kept_and_trimmed(device: Device, client: Client) -> None:
    kv = client.alloc_kvcache(TINY, 1 << 16, reserved_blocks=0)
    pages_per_slab = QUANTUM // PAGE
    kv.set_spare_pages(pages_per_slab, 2 * pages_per_slab)
    ids = kv.alloc_kv(2 * BLOCKS_PER_SLAB)
    kv.free_kv(ids)
    assert kv.mapped_bytes() == 0
    assert device.usage().committed_bytes == 2 * QUANTUM
    ids = kv.alloc_kv(3 * BLOCKS_PER_SLAB)
    assert device.usage().committed_bytes == 3 * QUANTUM
    kv.free_kv(ids)  # three slabs of spares are above the high mark
    assert device.usage().committed_bytes == QUANTUM
    assert kv.trim() == pages_per_slab
    assert kv.trim() == 0
    assert device.usage().committed_bytes == 0
    with pytest.raises(errors.InvalidArgumentError, match="watermark"):
        kv.set_spare_pages(2, 1)


def test_two_caches_of_one_client_share_nothing(client: Client) -> None:
    first, second = (client.alloc_kvcache(TINY, 1 << 12) for _ in range(2))
    as_array(first.k_buffer(0))[: TINY.block_tokens] = 1
    as_array(second.k_buffer(0))[: TINY.block_tokens] = 2
    client.free_kvcache(second)
    assert (as_array(first.k_buffer(0))[: TINY.block_tokens] == 1).all()
    with pytest.raises(errors.ClosedError, match="freed"):
        second.alloc_kv(1)


def test_closing_the_client_returns_everything(device: Device) -> None:
    client = device.client("brief")
    kv = client.alloc_kvcache(TINY, 1 << 12)
    assert kv.alloc_kv(100) is not None
    view = kv.k_buffer(0)
    client.close()
    client.close()
    assert device.usage().free_bytes == CAPACITY
    for call in (kv.trim, kv.check_integrity, client.usage, view.__dlpack__):
        with pytest.raises(errors.ClosedError):
            call()


@pytest.mark.parametrize("when", ["never", "freed", "closed"])
def test_reading_a_hole_is_a_fault(device: Device, spawn: Spawn, when: str) -> None:
    toucher = spawn("touch_hole", when)
    said, _ = toucher.communicate(timeout=60)
    assert said.splitlines() == ["floor 0.0"]
    assert toucher.returncode == -signal.SIGSEGV


def test_a_view_keeps_its_address_range(client: Client) -> None:
    kv = client.alloc_kvcache(TINY, 1 << 16)
    view = as_array(kv.k_buffer(0))
    start, end = view.ctypes.data, view.ctypes.data + view.nbytes
    client.free_kvcache(kv)
    del kv
    for _ in range(50):
        tensor = client.alloc_virtual_tensor(view.nbytes)
        address = tensor.view([1], "uint8").address
        assert address + tensor.size_bytes <= start or address >= end
