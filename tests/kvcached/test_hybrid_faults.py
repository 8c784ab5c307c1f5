"""Driver failures in the middle of a call on several pools, which leave all of them unchanged."""

from __future__ import annotations

import numpy as np
import pytest

from kvcached import Client, Device, HybridLayout, KVCacheGroup, Layout, errors

from .conftest import PAGE
from .libcuda import LibCuda

ALL = Layout(num_layers=3, num_kv_heads=1, head_dim=128, dtype="float32", block_tokens=16)
HYBRID = HybridLayout.sliding(ALL, [0, 2], 64)
SLAB_BLOCKS = 8


@pytest.fixture
def device_name() -> str:
    return "cuda:0"


@pytest.fixture
def client(device: Device, libcuda: LibCuda):  # type: ignore[no-untyped-def]
    with device.client("test", background=False) as opened:
        yield opened
        libcuda.pass_all()
    assert libcuda.used_bytes() == 0


def state(group: KVCacheGroup, device: Device, libcuda: LibCuda) -> tuple[object, ...]:
    group.check_integrity()
    pools = [(p.live_blocks(), p.mapped_bytes()) for p in group.pools.values()]
    usage = device.usage()
    return (*pools, usage.reserved_bytes, usage.committed_bytes, libcuda.used_bytes())


@pytest.mark.parametrize("error", [LibCuda.INVALID_VALUE, LibCuda.OUT_OF_MEMORY])
def test_a_failing_call_at_any_point_of_alloc(
    device: Device, client: Client, libcuda: LibCuda, error: int
) -> None:
    client.set_create_wait(0.0)  # otherwise the driver is asked again
    group = client.alloc_kvcache(HYBRID, 1 << 12)
    held = group.alloc_kv({"full": 3, "window": 3})
    before, failures = state(group, device, libcuda), 0
    wanted = {"full": SLAB_BLOCKS, "window": SLAB_BLOCKS}
    while True:
        libcuda.fail_at(failures + 1, error=error)
        try:
            ids = group.alloc_kv(wanted)
        except errors.SystemCallError:
            ids = None
        libcuda.pass_all()
        if ids is not None:
            break
        failures += 1
        group.trim()
        assert state(group, device, libcuda) == before
    # Pages in 2 buffers of the full layer and 4 of the others: a create, a map, an access each.
    assert failures == 18
    assert group.mapped_bytes() == 2 * HYBRID.quantum_bytes(PAGE)
    group.free_kv(ids)
    group.free_kv(held)


def test_a_failing_call_at_any_point_of_free(
    device: Device, client: Client, libcuda: LibCuda
) -> None:
    group = client.alloc_kvcache(HYBRID, 1 << 12)
    floor = state(group, device, libcuda)
    for nth in range(1, 13):  # 6 unmaps, 6 releases
        ids = group.alloc_kv({"full": SLAB_BLOCKS, "window": SLAB_BLOCKS})
        libcuda.fail_at(nth)
        group.free_kv(ids)
        libcuda.pass_all()
        assert group.live_blocks() == {"full": 0, "window": 0}
        # A release that fails half way leaves handles without memory, charged until the next trim.
        assert libcuda.used_bytes() <= device.usage().committed_bytes
        group.trim()
        assert state(group, device, libcuda) == floor


def test_a_failing_call_while_it_is_made(device: Device, client: Client, libcuda: LibCuda) -> None:
    failures = 0
    while True:
        libcuda.fail_at(failures + 1)
        try:
            group = client.alloc_kvcache(HYBRID, 1 << 12)
        except errors.KvcachedError:
            failures += 1
            libcuda.pass_all()
            assert device.usage().reserved_bytes == libcuda.used_bytes() == 0
            continue
        break
    libcuda.pass_all()
    # Each pool reserves addresses first, and fills the runs of its padding last.
    runs = sum(2 * group.layout.num_layers for group in HYBRID.groups)
    assert failures == 2 + 18 + 2 * runs
    assert group.alloc_kv({"full": 1, "window": 1}) is not None
    group.free_kv({"window": np.array([1])})
