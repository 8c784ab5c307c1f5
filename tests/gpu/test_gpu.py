"""kvcached on a real GPU: the conformance suite, a KV cache, and NVIDIA's own view of both."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import numpy as np
import pytest

from kvcached import Client, Device, Layout, NoRoomError, errors
from tests.kvcached.compiling import build_tests

PAGE = 2 << 20

CAPACITY = 64 * PAGE
pytestmark = pytest.mark.usefixtures("gpu")

LAYOUT = Layout(num_layers=4, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16)


@pytest.fixture
def device(namespace: str) -> Iterator[Device]:
    opened = Device.open("cuda:0", capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace)
    yield opened
    Device.unlink(namespace, "cuda:0")


@pytest.fixture
def client(device: Device) -> Iterator[Client]:
    with device.client("gpu-test") as opened:
        yield opened


@pytest.mark.timeout(600)
def test_the_driver_conforms_to_vmm_h() -> None:
    done = subprocess.run([build_tests()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cuda: conforms to vmm.h" in done.stdout
    assert "cuda below faults: conforms to vmm.h" in done.stdout


def test_blocks_come_and_go(device: Device, client: Client) -> None:
    kv = client.alloc_kvcache(LAYOUT, 1 << 16)
    ids = kv.alloc_kv(kv.available_blocks())
    assert ids is not None
    assert device.resident_bytes() == CAPACITY
    assert kv.alloc_kv(1) is None
    with pytest.raises(NoRoomError):
        client.alloc_virtual_tensor(PAGE).map(0, PAGE)
    kv.free_kv(ids)
    assert device.resident_bytes() == kv.floor_bytes()


def test_gpus_that_do_not_exist(namespace: str) -> None:
    absent = Device.open("cuda:999", capacity_bytes=PAGE, namespace=namespace)
    with pytest.raises(errors.UnknownDeviceError, match="does not exist"):
        absent.client("a")
    absent.destroy()


def test_torch_reads_what_it_wrote(client: Client) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    kv = client.alloc_kvcache(LAYOUT, 1 << 14)
    ids = kv.alloc_kv(64)
    assert ids is not None
    rows = torch.from_numpy(ids[:, None] * 16 + np.arange(16)).flatten().to("cuda:0")
    for layer in range(LAYOUT.num_layers):
        torch.from_dlpack(kv.k_buffer(layer))[rows] = layer
    for layer in range(LAYOUT.num_layers):
        assert (torch.from_dlpack(kv.k_buffer(layer))[rows] == layer).all()
    torch.cuda.synchronize()
