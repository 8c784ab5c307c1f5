"""What holes of the KV space show, and what its pages contain."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kvcached import Client, Device, KVCache, NoRoomError

from .arrays import as_array
from .conftest import CAPACITY, EVERY_DEVICE, PAGE, TINY
from .libcuda import LibCuda

pytestmark = EVERY_DEVICE

SLAB = TINY.slab_tokens(PAGE) // TINY.block_tokens
QUANTUM = TINY.quantum_bytes(PAGE)


@pytest.fixture
def client(device: Device) -> Iterator[Client]:
    with device.client("test") as opened:
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
client = Device.open(name, namespace=namespace).client("writes")
client.guard_holes()
kv = client.alloc_kvcache(TINY, 1 << 16)
ids = kv.alloc_kv(40)
kv.free_kv(ids)
k = as_array(kv.k_buffer(0))
token = int(ids[-1]) * TINY.block_tokens if where == "freed" else kv.num_tokens - 1
print(float(k[token, 0, 0]) if where == "freed" else "never mapped", flush=True)
k[token, 0, 0] = 1.0
print("wrote", flush=True)
"""


@pytest.mark.parametrize("where", ["freed", "never"])
def test_writing_to_a_hole_is_a_fault(
    device: Device, device_name: str, namespace: str, where: str
) -> None:
    program = [sys.executable, "-c", WRITE, device_name, namespace, where]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    first = "0.0" if where == "freed" else "never mapped"
    assert (done.stdout, done.returncode) == (f"{first}\n", -11), done.stderr


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
    """What a slab of 4 buffers, a page each, costs more: see docs/decisions/067."""
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
