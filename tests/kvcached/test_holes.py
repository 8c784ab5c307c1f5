"""Reads of holes in the KV space, and the content of its pages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvcached import (
    Client,
    Device,
    HybridLayout,
    KVCache,
    KVCacheGroup,
    KVLayout,
    MLALayout,
    NoRoomError,
)

from .arrays import as_array
from .conftest import CAPACITY, EVERY_DEVICE, PAGE, TINY
from .libcuda import LibCuda

pytestmark = EVERY_DEVICE

SLAB = TINY.slab_tokens(PAGE) // TINY.block_tokens
QUANTUM = TINY.quantum_bytes(PAGE)


@pytest.fixture
def client(device: Device) -> Iterator[Client]:
    with device.client("test", background=False) as opened:
        yield opened


def alloc(kv: KVCache, blocks: int) -> np.ndarray:
    ids = kv.alloc_kv(blocks)
    assert ids is not None
    return ids


def tokens(ids: np.ndarray) -> np.ndarray:
    return (ids[:, None] * TINY.block_tokens + np.arange(TINY.block_tokens)).reshape(-1)


def test_a_freed_block_reads_as_zeros(device: Device, client: Client) -> None:
    client.guard_holes()
    client.guard_holes()  # once is enough
    assert client.usage().static_bytes == PAGE
    kv = client.alloc_kvcache(TINY, 1 << 16)
    k = as_array(kv.k_buffer(1))
    stale = alloc(kv, 4 * SLAB - 1)
    k[tokens(stale)] = 3.0
    kv.free_kv(stale)
    assert device.usage().reserved_bytes == PAGE + QUANTUM
    assert (k[tokens(stale[SLAB:])] == 0).all()
    fresh = alloc(kv, 4 * SLAB - 1)
    k[tokens(fresh)] = 5.0
    assert (k[tokens(fresh)] == 5).all()
    client.free_kvcache(kv)
    client.close()
    assert device.usage().reserved_bytes == 0


WRITE = """
import sys
import numpy as np
from kvcached import Device
from tests.kvcached.arrays import as_array
from tests.kvcached.conftest import TINY
name, namespace, where = sys.argv[1:]
client = Device.open(name, namespace=namespace).client(
    "writes", background=False, guard_holes=True)
kv = client.alloc_kvcache(TINY, 1 << 16)
ids = kv.alloc_kv(40)
kv.free_kv(ids)
k = as_array(kv.k_buffer(0))
token = int(ids[-1]) * TINY.block_tokens if where == "freed" else kv.num_tokens - 1
print(float(k[token, 0, 0]), flush=True)
k[token, 0, 0] = 1.0
print("wrote", flush=True)
"""


@pytest.mark.parametrize("where", ["freed", "never"])
def test_writing_to_a_hole_is_a_fault(
    device: Device, device_name: str, namespace: str, where: str
) -> None:
    program = [sys.executable, "-c", WRITE, device_name, namespace, where]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("0.0\n", -11), done.stderr


ARRANGED = {
    "per_layer": TINY,
    "token_interleaved": replace(TINY, arrangement="token_interleaved"),
    "block_interleaved": replace(TINY, arrangement="block_interleaved"),
    "latent": MLALayout(
        num_layers=2, kv_lora_rank=96, rope_dim=32, dtype="float32", block_tokens=16
    ),
    "hybrid": HybridLayout.sliding(TINY, [0], 64),
}


@pytest.mark.parametrize("layout", ARRANGED.values(), ids=ARRANGED.keys())
def test_a_client_that_guards_its_holes_from_the_start(
    device: Device, layout: KVLayout | HybridLayout
) -> None:
    """Allows reads of every block at all times, allocated or not: a kernel's indices come from
    outside of it."""
    with device.client("guards", guard_holes=True) as client:
        assert client.usage().static_bytes == PAGE
        for _ in range(2):
            cache = client.alloc_kvcache(layout, 1 << 12)
            pools = list(cache.pools.values()) if isinstance(cache, KVCacheGroup) else [cache]
            for kv in pools:
                last = kv.num_blocks - 1
                views = [as_array(kv.blocks(part.layer, part.name)) for part in kv.layout.parts]
                assert all(float(np.abs(view[last]).sum()) == 0 for view in views)
                ids = alloc(kv, kv.available_blocks() // 2)  # the thread moves pages meanwhile
                kv.free_kv(ids[::2])
                kv.free_kv(ids[1::2])
                kv.trim()
                views = [as_array(kv.blocks(part.layer, part.name)) for part in kv.layout.parts]
                last = int(ids.max())
                assert all(float(np.abs(view[last]).sum()) == 0 for view in views)
                assert all(np.isfinite(view[0]).all() for view in views)  # padding stays
            client.free_kvcache(cache)


def test_a_client_that_cannot_have_its_guard_page_is_not_opened(device: Device) -> None:
    with device.client("full") as full:
        full.reserve_static(CAPACITY, "all of it")
        with pytest.raises(NoRoomError):
            device.client("guards", guard_holes=True)
        assert [client.name for client in device.usage().clients] == ["full"]


def test_padding_holds_zeros_and_nothing_else_is_promised(client: Client) -> None:
    """Kernels read the reserved blocks as padding. Fresh pages of a GPU may hold anything."""
    kv = client.alloc_kvcache(TINY, 1 << 14, reserved_blocks=SLAB + 1)
    for part in kv.layout.parts:
        view = as_array(kv.blocks(part.layer, part.name))
        assert (view[: 2 * SLAB] == 0).all()


def test_the_guard_page_is_leased(device: Device, client: Client) -> None:
    with device.client("other") as other:
        other.reserve_static(CAPACITY, "all of it")
        with pytest.raises(NoRoomError):
            client.guard_holes()
        assert client.usage().static_bytes == 0
    client.guard_holes()
    assert client.usage().static_bytes == PAGE


def test_a_page_shows_this_clients_old_data_unless_scrubbed(client: Client) -> None:
    kv = client.alloc_kvcache(TINY, 1 << 14, reserved_blocks=0)
    kv.set_spare_pages(0, 64)
    k = as_array(kv.k_buffer(0))
    for scrubbed in (False, True):
        if scrubbed:
            client.scrub_pages()
        ids = alloc(kv, SLAB)
        k[tokens(ids)] = 7.0
        kv.free_kv(ids)
        again = alloc(kv, SLAB)
        assert (k[tokens(again)] == (0 if scrubbed else 7)).all()
        kv.free_kv(again)


def test_driver_calls_of_guard_and_scrub(
    client: Client, device_name: str, libcuda: LibCuda
) -> None:
    """Counts the additional calls of a slab of 4 buffers, a page each: see docs/decisions/067."""
    if device_name != "cuda:0":
        pytest.skip("counted on the test libcuda")
    kv = client.alloc_kvcache(TINY, 1 << 16, reserved_blocks=0)
    kv.set_spare_pages(0, 64)
    kv.free_kv(alloc(kv, SLAB))
    libcuda.reset()
    kv.free_kv(alloc(kv, SLAB))
    assert libcuda.count() == {"Map": 4, "SetAccess": 4, "Unmap": 4}
    client.guard_holes()
    kv.free_kv(alloc(kv, SLAB))
    libcuda.reset()
    kv.free_kv(alloc(kv, SLAB))
    assert libcuda.count() == {"Map": 8, "SetAccess": 8, "Unmap": 8}
    client.scrub_pages()
    libcuda.reset()
    kv.free_kv(alloc(kv, SLAB))
    assert libcuda.calls("cuMemsetD8Async") == libcuda.calls("cuStreamSynchronize") == 4


def test_a_driver_without_read_only_mappings(
    device: Device, device_name: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device_name != "cuda:0":
        pytest.skip("a host device has them")
    monkeypatch.setenv("KVCACHED_TEST_CUDA_READ_ONLY", "0")
    program = [sys.executable, "-c", WRITE, device_name, namespace, "freed"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("0.0\nwrote\n", 0), done.stderr
