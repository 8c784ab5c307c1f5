"""Choice of blocks to evict from a prefix cache: by page, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcached import Client, Device, KVCache, errors

from .caches import Cache
from .conftest import EVERY_DEVICE, PAGE, TINY

pytestmark = EVERY_DEVICE

SLAB_BLOCKS = TINY.slab_tokens(PAGE) // TINY.block_tokens
SLAB_BYTES = TINY.quantum_bytes(PAGE)


@pytest.fixture
def client(device: Device) -> Iterator[Client]:
    """Yields a client without the thread that maps ahead on a GPU: only the test takes memory."""
    with device.client("a", background=False) as opened:
        yield opened


def cache_of(client: Client, slabs: int) -> tuple[KVCache, NDArray[np.int64]]:
    """Returns a cache and the ids of its live blocks, which fill `slabs` slabs, by slab."""
    kv = client.alloc_kvcache(TINY, 1 << 16, reserved_blocks=0)
    ids = kv.alloc_kv(slabs * SLAB_BLOCKS)
    assert ids is not None
    return kv, np.sort(ids).reshape(slabs, SLAB_BLOCKS)


def chosen(kv: KVCache, ids: NDArray[np.int64], slabs: int) -> list[int]:
    found, freed_bytes = kv.choose_evictions(ids, np.arange(len(ids)), slabs * SLAB_BYTES)
    assert freed_bytes <= slabs * SLAB_BYTES
    return [int(i) for i in found]


def test_the_emptiest_slab_goes_first_then_the_oldest(client: Client) -> None:
    kv, slabs = cache_of(client, 4)
    kv.free_kv(slabs[2][1:])  # one block is left in it
    kv.free_kv(slabs[0][4:])  # half of it
    ids = np.concatenate([slabs[0][:4], slabs[1], slabs[2][:1], slabs[3]])
    last_used = np.full(len(ids), 100)
    last_used[ids == slabs[3][2]] = 90
    last_used[np.isin(ids, slabs[3])] -= 50  # the slab as a whole is older than slab 1
    order, freed_bytes = kv.choose_evictions(ids, last_used, 4 * SLAB_BYTES)
    expected = [*slabs[2][:1], *slabs[0][:4], *slabs[3], *slabs[1]]
    assert list(order) == expected
    assert freed_bytes == 4 * SLAB_BYTES
    for count in range(5):
        prefix, freed_bytes = kv.choose_evictions(ids, last_used, count * SLAB_BYTES)
        assert freed_bytes == count * SLAB_BYTES
        assert list(prefix) == expected[: len(prefix)]
    assert len(kv.choose_evictions(ids, last_used, 1)[0]) == 1  # one byte takes a slab


def test_a_slab_with_a_block_in_use_stays(client: Client) -> None:
    kv, slabs = cache_of(client, 3)
    evictable = np.concatenate([slabs[0], slabs[1][:-1], slabs[2]])
    assert chosen(kv, evictable, 10) == [*slabs[0], *slabs[2]]
    assert kv.evictable_bytes(Cache(kv, evictable)) == 2 * SLAB_BYTES


def test_a_slab_with_reserved_blocks_stays(client: Client) -> None:
    kv = client.alloc_kvcache(TINY, 1 << 16, reserved_blocks=1)
    ids = kv.alloc_kv(2 * SLAB_BLOCKS - 1)
    assert ids is not None
    assert sorted(chosen(kv, ids, 10)) == list(range(SLAB_BLOCKS, 2 * SLAB_BLOCKS))


def test_shrinking_takes_spares_first_and_then_no_more_cache_than_it_must(client: Client) -> None:
    kv, slabs = cache_of(client, 6)
    kv.set_premapped_pages(0, 1000)
    kv.free_kv(slabs[:2].ravel())
    cache = Cache(kv, slabs[2:].ravel())
    assert client.usage().spare_bytes == 2 * SLAB_BYTES
    first = kv.shrink(SLAB_BYTES, cache)
    assert (first.returned_bytes, first.evicted_tokens) == (2 * SLAB_BYTES, 0)
    assert client.usage().spare_bytes == 0
    second = kv.shrink(SLAB_BYTES + 1, cache)
    assert second.returned_bytes == second.evicted_bytes == 2 * SLAB_BYTES
    assert second.evicted_tokens == 2 * SLAB_BLOCKS * TINY.block_tokens
    assert list(np.sort(cache.ids)) == list(slabs[4:].ravel())
    assert kv.shrink(None, cache).returned_bytes == 2 * SLAB_BYTES
    assert kv.shrink(None, cache).returned_bytes == 0
    assert client.usage().committed_bytes == 0


def test_thousands_of_ids_agree_with_a_model(client: Client) -> None:
    rng = np.random.default_rng(7)
    kv, slabs = cache_of(client, 200)
    gone = rng.random(slabs.shape) < 0.4
    kv.free_kv(slabs[gone])
    live = slabs[~gone]
    evictable = rng.permutation(live[rng.random(len(live)) < 0.9])
    last_used = rng.integers(0, 50, len(evictable))
    order, freed_bytes = kv.choose_evictions(evictable, last_used, 30 * SLAB_BYTES)
    used_at = dict(zip(evictable.tolist(), last_used.tolist(), strict=True))
    by_slab: dict[int, list[int]] = {}
    for block in live.tolist():
        by_slab.setdefault(block // SLAB_BLOCKS, []).append(block)
    able = [s for s, blocks in by_slab.items() if all(b in used_at for b in blocks)]
    able.sort(key=lambda s: (len(by_slab[s]), max(used_at[b] for b in by_slab[s]), s))
    expected = [block for slab in able[:30] for block in sorted(by_slab[slab])]
    assert order.tolist() == expected
    assert freed_bytes == min(30, len(able)) * SLAB_BYTES
    assert kv.choose_evictions(evictable[::2], last_used[::2], 1)[1] in (0, SLAB_BYTES)


def test_bad_ids_choose_nothing(client: Client) -> None:
    kv, slabs = cache_of(client, 2)
    times = np.zeros(2, dtype=np.int64)
    with pytest.raises(errors.DoubleFreeError, match="named twice"):
        kv.choose_evictions(slabs[0][[3, 3]], times, 1)
    with pytest.raises(errors.UnknownBlockError, match="does not belong to this KV cache"):
        kv.choose_evictions(np.array([3, kv.num_blocks]), times, 1)
    kv.free_kv(slabs[1])
    with pytest.raises(errors.DoubleFreeError, match="not allocated"):
        kv.choose_evictions(slabs[1][:2], times, 1)
    with pytest.raises(errors.InvalidArgumentError, match="the same length"):
        kv.choose_evictions(slabs[0], times, 1)
    with pytest.raises(errors.InvalidArgumentError, match="1-D int64"):
        kv.choose_evictions(slabs[0].astype(np.int32), times, 1)
    with pytest.raises(errors.InvalidArgumentError, match="size_bytes is -1"):
        kv.choose_evictions(slabs[0], slabs[0], -1)
    kv.check_integrity()
