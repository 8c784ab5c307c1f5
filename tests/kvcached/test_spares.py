"""Pages kept ahead of need: the calls that they save, and their release under all pressures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcached import Client, Device, Fragmentation, KVCache, NoRoomError, errors

from .conftest import CAPACITY, PAGE, TINY

BLOCKS_PER_SLAB = TINY.slab_tokens(PAGE) // TINY.block_tokens
QUANTUM = TINY.quantum_bytes(PAGE)
SLAB_PAGES = QUANTUM // PAGE
SLABS = CAPACITY // QUANTUM


@pytest.fixture
def client(device: Device) -> Iterator[Client]:
    with device.client("test", background=False) as opened:
        yield opened


@pytest.fixture
def kv(client: Client) -> KVCache:
    return client.alloc_kvcache(TINY, 1 << 16, reserved_blocks=0)


def hold_spares(kv: KVCache, slabs: int) -> None:
    """Leaves this many slabs mapped and as many unmapped handles, with no block live."""
    kv.set_premapped_pages(slabs * SLAB_PAGES, slabs * SLAB_PAGES)
    kv.set_spare_pages(slabs * SLAB_PAGES, slabs * SLAB_PAGES)
    ids = kv.alloc_kv(2 * slabs * BLOCKS_PER_SLAB)
    assert ids is not None
    kv.free_kv(ids)  # all slabs above the high mark, so all but the low mark are unmapped
    assert kv.mapped_bytes() == slabs * QUANTUM


def test_premapped_pages_need_no_call_to_the_driver(kv: KVCache) -> None:
    kv.set_premapped_pages(2 * SLAB_PAGES, 4 * SLAB_PAGES)
    assert kv.mapped_bytes() == 0
    assert kv.refill() == 2 * SLAB_PAGES
    assert kv.refill() == 0
    before = kv.counters()
    for _ in range(3):
        ids = kv.alloc_kv(2 * BLOCKS_PER_SLAB)
        assert ids is not None
        kv.free_kv(ids)
    assert kv.counters() == before


def test_mapped_slabs_stay_between_the_watermarks(kv: KVCache) -> None:
    kv.set_premapped_pages(SLAB_PAGES, 3 * SLAB_PAGES)
    first, second = kv.alloc_kv(3 * BLOCKS_PER_SLAB), kv.alloc_kv(BLOCKS_PER_SLAB)
    assert first is not None
    assert second is not None
    kv.free_kv(first)
    assert kv.mapped_bytes() == 4 * QUANTUM
    kv.free_kv(second)
    assert kv.mapped_bytes() == QUANTUM
    assert kv.free_mapped_blocks() == BLOCKS_PER_SLAB
    kv.set_premapped_pages(0, SLAB_PAGES - 1)  # less than a slab counts as none
    assert kv.mapped_bytes() == 0
    with pytest.raises(errors.InvalidArgumentError, match="watermark"):
        kv.set_premapped_pages(2, 1)
    kv.check_integrity()


def test_trim_gives_both_tiers_back(device: Device, kv: KVCache) -> None:
    hold_spares(kv, 2)
    assert device.usage().committed_bytes == 4 * QUANTUM
    assert kv.trim() == 4 * SLAB_PAGES
    assert device.usage().committed_bytes == 0


def test_a_lower_limit_takes_the_spares_at_once(
    device: Device, client: Client, kv: KVCache
) -> None:
    hold_spares(kv, 2)
    client.set_limit(4 * QUANTUM)
    assert device.usage().committed_bytes == 4 * QUANTUM
    client.set_limit(QUANTUM)
    assert device.usage().committed_bytes == 0
    assert kv.alloc_kv(BLOCKS_PER_SLAB + 1) is None
    assert kv.alloc_kv(BLOCKS_PER_SLAB) is not None


def test_refill_takes_no_more_than_there_is(device: Device, client: Client, kv: KVCache) -> None:
    kv.set_premapped_pages(3 * SLAB_PAGES, 3 * SLAB_PAGES)
    client.set_limit(2 * QUANTUM)
    assert kv.refill() == 2 * SLAB_PAGES
    client.set_limit(None)
    neighbour = device.client("neighbour")
    lease = neighbour.reserve_static(CAPACITY - 2 * QUANTUM, "weights")
    assert kv.refill() == 0
    lease.release()
    assert kv.refill() == SLAB_PAGES
    neighbour.close()


def test_another_cache_of_the_client_finds_the_room(client: Client, kv: KVCache) -> None:
    hold_spares(kv, SLABS // 2)
    other = client.alloc_kvcache(TINY, 1 << 16, reserved_blocks=0)
    assert other.alloc_kv(SLABS * BLOCKS_PER_SLAB) is not None
    assert kv.mapped_bytes() == 0
    assert other.alloc_kv(1) is None


def test_a_tensor_and_a_lease_of_the_client_find_the_room(client: Client, kv: KVCache) -> None:
    hold_spares(kv, SLABS // 2)
    tensor = client.alloc_virtual_tensor(CAPACITY)
    tensor.map(0, CAPACITY)
    tensor.unmap(0, CAPACITY)
    hold_spares(kv, SLABS // 2)
    with pytest.raises(NoRoomError):
        client.reserve_static(CAPACITY + PAGE, "too much")
    lease = client.reserve_static(CAPACITY, "weights")
    assert kv.alloc_kv(1) is None
    lease.release()
    assert kv.alloc_kv(1) is not None


def test_a_dead_cache_is_not_asked(client: Client, kv: KVCache) -> None:
    hold_spares(kv, 1)
    client.free_kvcache(kv)
    del kv
    client.reserve_static(CAPACITY, "weights").release()


def test_fragmentation_is_mapped_over_needed(client: Client) -> None:
    kv = client.alloc_kvcache(TINY, 1 << 16, reserved_blocks=1)
    assert kv.fragmentation() == Fragmentation(QUANTUM, QUANTUM)
    ids = kv.alloc_kv(4 * BLOCKS_PER_SLAB - 1)
    assert ids is not None
    assert kv.fragmentation().ratio == 1
    kv.free_kv(ids[ids % BLOCKS_PER_SLAB != 0])  # one live block in each slab, and the padding
    assert kv.fragmentation() == Fragmentation(4 * QUANTUM, QUANTUM)
    assert kv.fragmentation().ratio == 4
    bare = client.alloc_kvcache(TINY, 1 << 16, reserved_blocks=0)
    assert bare.fragmentation().ratio == 1
    hold_spares(bare, 1)
    assert bare.fragmentation().ratio == float("inf")
