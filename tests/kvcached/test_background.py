"""Thread that keeps spare pages, through the Python API. tests/cpp covers its races."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from kvcached import Client, Device, KVCache
from kvcached.errors import ForkedClientError

from .conftest import CAPACITY, PAGE, TINY, Spawn

BLOCKS_PER_SLAB = TINY.slab_tokens(PAGE) // TINY.block_tokens
QUANTUM = TINY.quantum_bytes(PAGE)
SLAB_PAGES = QUANTUM // PAGE


@pytest.fixture
def client(device: Device) -> Iterator[Client]:
    with device.client("test") as opened:
        yield opened


@pytest.fixture
def kv(client: Client) -> KVCache:
    return client.alloc_kvcache(TINY, 1 << 16, reserved_blocks=0)


def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("the thread never did it")


def test_pages_are_mapped_ahead_of_need(device: Device, kv: KVCache) -> None:
    kv.set_premapped_pages(2 * SLAB_PAGES, 3 * SLAB_PAGES)
    kv.set_spare_pages(SLAB_PAGES, SLAB_PAGES)
    eventually(lambda: kv.mapped_bytes() == 2 * QUANTUM)
    eventually(lambda: device.usage().committed_bytes == 3 * QUANTUM)
    ids = kv.alloc_kv(2 * BLOCKS_PER_SLAB)
    assert ids is not None
    eventually(lambda: kv.mapped_bytes() == 4 * QUANTUM)
    kv.free_kv(ids)  # above the high mark
    eventually(lambda: kv.mapped_bytes() == 2 * QUANTUM)
    eventually(lambda: device.usage().committed_bytes == 3 * QUANTUM)
    kv.check_integrity()


def test_a_limit_of_another_process_takes_the_spares(
    device: Device, kv: KVCache, spawn: Spawn
) -> None:
    held = kv.alloc_kv(1)
    assert held is not None
    kv.set_premapped_pages(4 * SLAB_PAGES, 4 * SLAB_PAGES)
    eventually(lambda: kv.mapped_bytes() == 5 * QUANTUM)
    spawn("set_limit", "test", QUANTUM).wait(60)
    eventually(lambda: kv.mapped_bytes() == QUANTUM)
    assert kv.live_blocks() == 1


def test_a_neighbour_who_fills_the_device_gets_the_spares(device: Device, kv: KVCache) -> None:
    kv.set_premapped_pages(4 * SLAB_PAGES, 4 * SLAB_PAGES)
    eventually(lambda: kv.mapped_bytes() == 4 * QUANTUM)
    with device.client("neighbour") as neighbour:
        lease = neighbour.reserve_static(CAPACITY - 5 * QUANTUM, "weights")
        eventually(lambda: kv.mapped_bytes() == 0)
        lease.release()
        eventually(lambda: kv.mapped_bytes() == 4 * QUANTUM)


def test_what_siblings_would_give_back_is_available(client: Client, kv: KVCache) -> None:
    kv.set_premapped_pages(4 * SLAB_PAGES, 4 * SLAB_PAGES)
    eventually(lambda: kv.mapped_bytes() == 4 * QUANTUM)
    sibling = client.alloc_kvcache(TINY, 1 << 17, reserved_blocks=0)
    available = CAPACITY // QUANTUM * BLOCKS_PER_SLAB
    assert sibling.available_blocks() == available
    assert sibling.alloc_kv(available) is not None


def test_a_forked_child_has_no_thread(kv: KVCache) -> None:
    kv.set_premapped_pages(2 * SLAB_PAGES, 2 * SLAB_PAGES)
    child = os.fork()
    if child == 0:
        try:
            kv.alloc_kv(1)
        except ForkedClientError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    eventually(lambda: kv.mapped_bytes() == 2 * QUANTUM)
