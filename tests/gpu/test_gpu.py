"""kvcached on a real GPU: the conformance suite, a KV cache, and NVIDIA's own view of both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcached import Client, Device, Layout, NoRoomError, errors
from kvcached.layouts import ARRANGEMENTS, Arrangement
from tests.kvcached.compiling import ROOT, build_tests

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
    """Yields a client without kvcached's thread, since pages that it holds ready would count."""
    with device.client("gpu-test", background=False) as opened:
        yield opened


@pytest.mark.timeout(600)
def test_the_driver_conforms_to_vmm_h() -> None:
    program = build_tests(os.environ.get("KVCACHED_TEST_SANITIZERS", ""))
    done = subprocess.run([program], capture_output=True, text=True, check=False)
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


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_layouts_grow_by_their_quantum(
    device: Device, client: Client, arrangement: Arrangement
) -> None:
    layout = replace(LAYOUT, arrangement=arrangement)
    kv = client.alloc_kvcache(layout, 1 << 16, reserved_blocks=0)
    ids = kv.alloc_kv(1)
    assert ids is not None
    assert device.resident_bytes() == layout.quantum_bytes(PAGE)
    kv.free_kv(ids)
    assert device.resident_bytes() == 0


def test_gpus_that_do_not_exist(namespace: str) -> None:
    absent = Device.open("cuda:999", capacity_bytes=PAGE, namespace=namespace)
    with pytest.raises(errors.UnknownDeviceError, match="does not exist"):
        absent.client("a")
    absent.destroy()


@pytest.fixture
def torch() -> Iterator[Any]:
    """Yields torch, and waits for its work at the end. Requested after `client`, so that pages are
    unmapped later."""
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("this torch lacks CUDA")
    yield found
    found.cuda.synchronize()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_torch_takes_every_arrangement(
    client: Client, torch: Any, arrangement: Arrangement, dtype: str
) -> None:
    layout = replace(LAYOUT, arrangement=arrangement, dtype=dtype)
    kv = client.alloc_kvcache(layout, 1 << 14)
    ids = torch.from_numpy(kv.alloc_kv(32)).to("cuda:0")
    views = [torch.from_dlpack(kv.blocks(p.layer, p.name)) for p in layout.parts]
    written = [torch.randn(32, *v.shape[1:], device="cuda:0").to(v.dtype) for v in views]
    for view, tensor in zip(views, written, strict=True):
        view.view(torch.uint8)[ids] = tensor.view(torch.uint8)
    for view, tensor in zip(views, written, strict=True):
        assert torch.equal(view.view(torch.uint8)[ids], tensor.view(torch.uint8))


def test_the_layout_benchmark_runs_on_a_gpu(torch: Any) -> None:
    small = ["--layers", "2", "--batch", "2", "--context", "64", "--pairs", "2"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench/kv_layout.py"), "--device", "cuda:0", *small],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ratio") == 3


def test_torch_reads_what_it_wrote(client: Client, torch: Any) -> None:
    kv = client.alloc_kvcache(LAYOUT, 1 << 14)
    ids = kv.alloc_kv(64)
    assert ids is not None
    rows = torch.from_numpy(ids[:, None] * 16 + np.arange(16)).flatten().to("cuda:0")
    for layer in range(LAYOUT.num_layers):
        torch.from_dlpack(kv.k_buffer(layer))[rows] = layer
    for layer in range(LAYOUT.num_layers):
        assert (torch.from_dlpack(kv.k_buffer(layer))[rows] == layer).all()
