"""Quarantine, guarded holes and scrubbing on a real GPU, read back through NVIDIA's bindings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from uuid import uuid4

import pytest

from kvcached import Client, Device, Layout

from .oracle import Oracle

PAGE = 2 << 20
LAYOUT = Layout(num_layers=2, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16)
DEADLINE_S = 60.0

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture
def oracle() -> Oracle:
    return Oracle(pytest.importorskip("cuda.bindings.driver"))


@pytest.fixture
def client() -> Iterator[Client]:
    namespace = f"oracle{uuid4().hex[:8]}"
    device = Device.open("cuda:0", capacity_bytes=64 * PAGE, page_bytes=PAGE, namespace=namespace)
    with device.client("seen", background=False) as opened:
        yield opened
    device.destroy()


def test_freed_pages_go_once_the_stream_is_done(oracle: Oracle, client: Client) -> None:
    stream = oracle.stream()
    client.set_streams([stream, 0], max_wait_s=DEADLINE_S)
    kv = client.alloc_kvcache(LAYOUT, 1 << 14, reserved_blocks=0)
    floor_bytes = kv.mapped_bytes()
    ids = kv.alloc_kv(kv.num_blocks // 2)
    assert ids is not None
    address = kv.k_buffer(1).address
    for value in range(32):
        oracle.fill_behind(stream, address, value, PAGE)
    kv.free_kv(ids)
    deadline_s = time.monotonic() + DEADLINE_S
    while kv.mapped_bytes() > floor_bytes and time.monotonic() < deadline_s:
        kv.settle()
    assert (kv.mapped_bytes(), kv.quarantined_bytes()) == (floor_bytes, 0)
    assert oracle.access(address) == 0
    oracle.synchronise(stream)  # an unmap under the fills would have broken the context


def test_closing_waits_for_the_stream(oracle: Oracle, client: Client) -> None:
    stream = oracle.stream()
    client.set_streams([stream], max_wait_s=DEADLINE_S)
    tensor = client.alloc_virtual_tensor(2 * PAGE)
    tensor.map(0, 2 * PAGE)
    address = tensor.view([1], "uint8").address
    for value in range(32):
        oracle.fill_behind(stream, address, value, 2 * PAGE)
    tensor.unmap(0, PAGE)
    assert (oracle.access(address), oracle.access(address + PAGE)) == (0, 3)
    assert oracle.read(address + PAGE) == 31


def test_guarded_holes_read_as_zeros(oracle: Oracle, client: Client) -> None:
    client.guard_holes()
    tensor = client.alloc_virtual_tensor(4 * PAGE)
    tensor.map(0, 3 * PAGE)
    address = tensor.view([1], "uint8").address
    oracle.fill(address, 9, 3 * PAGE)
    tensor.unmap(PAGE, PAGE)
    # 3 on a driver without read-only mappings: see docs/gpu-results.md.
    assert oracle.access(address + PAGE) in (1, 3)
    assert (oracle.read(address + PAGE), oracle.read(address + 2 * PAGE)) == (0, 9)
    assert oracle.access(address + 3 * PAGE) == 0
    tensor.map(PAGE, PAGE)
    assert oracle.access(address + PAGE) == 3
    oracle.fill(address + PAGE, 5, PAGE)
    tensor.unmap(0, 3 * PAGE)
    assert oracle.read(address + PAGE) == 0


def test_scrubbed_pages_are_zero(oracle: Oracle, client: Client) -> None:
    client.scrub_pages()
    kv = client.alloc_kvcache(LAYOUT, 1 << 14, reserved_blocks=0)
    kv.set_spare_pages(64, 64)
    for is_used in (False, True):  # a fresh page may hold anything
        ids = kv.alloc_kv(kv.num_blocks // 2)
        assert ids is not None
        assert not is_used or oracle.read(kv.k_buffer(0).address) == 0
        oracle.fill(kv.k_buffer(0).address, 7, PAGE)
        kv.free_kv(ids)
