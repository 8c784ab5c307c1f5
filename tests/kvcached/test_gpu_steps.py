"""Cost of an engine's step on a GPU: no call to the driver while pages are ready, and none that
breaks the capture of a graph."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvcached import Client, Device, KVCache, KVLayout, Layout, NoRoomError
from kvcached.errors import PagesInUseError

from .conftest import CAPACITY, PAGE, TINY
from .libcuda import CudaStream, LibCuda

LAYOUTS = {
    "per_layer": TINY,
    "token_interleaved": replace(TINY, arrangement="token_interleaved"),
    "block_interleaved": replace(TINY, arrangement="block_interleaved"),
    "deep": replace(TINY, num_layers=8),
}
CAPTURED_GLOBALLY = 0  # CU_STREAM_CAPTURE_MODE_GLOBAL
NON_BLOCKING = 1


@pytest.fixture
def device_name() -> str:
    return "cuda:0"


@pytest.fixture
def client(device: Device, libcuda: LibCuda) -> Iterator[Client]:
    libcuda.library.test_cuda_thread_calls.restype = ctypes.c_uint64
    violations = libcuda.violations()
    with device.client("engine") as opened:
        yield opened
        libcuda.pass_all()
    assert libcuda.violations() == violations


def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it never came true")


def low_bytes(layout: KVLayout) -> int:
    """Returns the bytes that are kept ready: a 32nd of the device, in whole slabs.

    The device is too small for 128 MiB."""
    quantum = layout.quantum_bytes(PAGE)
    return CAPACITY // 32 // quantum * quantum


def is_stocked(kv: KVCache) -> bool:
    per_slab = kv.layout.slab_tokens(PAGE) // kv.layout.block_tokens
    ready = kv.free_mapped_blocks() // per_slab * kv.layout.quantum_bytes(PAGE)
    return ready >= low_bytes(kv.layout)


def calls_of_this_thread(libcuda: LibCuda) -> int:
    return int(libcuda.library.test_cuda_thread_calls(None))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("with_stream", [False, True])
def test_a_step_makes_no_call_to_the_driver(
    client: Client, libcuda: LibCuda, layout: Layout, with_stream: bool
) -> None:
    stream = CudaStream(libcuda)
    kv = client.alloc_kvcache(layout, 1 << 16)
    if with_stream:
        client.set_streams([stream.handle])
    per_slab = layout.slab_tokens(PAGE) // layout.block_tokens
    held = []
    for _ in range(4):
        eventually(lambda: is_stocked(kv))
        libcuda.reset()
        for _ in range(low_bytes(layout) // layout.quantum_bytes(PAGE)):
            ids = kv.alloc_kv(per_slab)
            assert ids is not None
            held.append(ids)
        assert calls_of_this_thread(libcuda) == 0
    # Far above the high watermark now: freed pages are unmapped, and not by this thread.
    libcuda.reset()
    for ids in held:
        kv.free_kv(ids)
    assert calls_of_this_thread(libcuda) == 0
    eventually(lambda: kv.mapped_bytes() - kv.floor_bytes() <= 2 * low_bytes(layout))
    assert libcuda.calls("cuMemUnmap") > 0
    assert calls_of_this_thread(libcuda) == 0
    client.close()
    stream.close()


def test_a_step_that_finds_nothing_ready_maps_itself(client: Client, libcuda: LibCuda) -> None:
    kv = client.alloc_kvcache(TINY, 1 << 16)
    eventually(lambda: is_stocked(kv))
    libcuda.reset()
    ids = kv.alloc_kv(kv.free_mapped_blocks() + 20 * TINY.slab_tokens(PAGE) // TINY.block_tokens)
    assert ids is not None
    assert calls_of_this_thread(libcuda) > 0


def test_without_a_thread_nothing_is_kept_ready(device: Device, libcuda: LibCuda) -> None:
    with device.client("plain", background=False) as client:
        kv = client.alloc_kvcache(TINY, 1 << 16)
        assert kv.mapped_bytes() == kv.floor_bytes()
        assert client.usage().committed_bytes == kv.floor_bytes()


@pytest.mark.parametrize("device_name", ["host:0"])
def test_on_a_host_device_nothing_is_kept_ready(client: Client, device_name: str) -> None:
    kv = client.alloc_kvcache(TINY, 1 << 16)
    time.sleep(0.05)
    assert kv.mapped_bytes() == kv.floor_bytes() == client.usage().committed_bytes


def test_what_is_kept_ready_goes_to_who_needs_it(device: Device, client: Client) -> None:
    """Leaves the guaranteed minimum of another client alone."""
    with device.client("other", min_bytes=CAPACITY // 2) as other:
        kv = client.alloc_kvcache(TINY, 1 << 16, reserved_blocks=0)
        eventually(lambda: is_stocked(kv))
        rest = CAPACITY // 2  # all but the minimum of `other`, ready pages included
        lease = other.reserve_static(rest, "the rest", wait_s=60)
        assert client.usage().reserved_bytes == 0
        with pytest.raises(NoRoomError):
            client.reserve_static(PAGE, "one more")
        assert kv.alloc_kv(1) is None
        lease.release()
        assert kv.alloc_kv(1) is not None
        big = other.alloc_kvcache(TINY, 1 << 18, reserved_blocks=0)
        per_slab = TINY.slab_tokens(PAGE) // TINY.block_tokens
        guaranteed = CAPACITY // 2 // TINY.quantum_bytes(PAGE) * per_slab
        assert big.alloc_kv(guaranteed) is not None


def test_pages_stay_until_the_stream_is_done(client: Client, libcuda: LibCuda) -> None:
    """Fences on the client's thread, after all earlier work of the stream."""
    stream = CudaStream(libcuda)
    kv = client.alloc_kvcache(TINY, 1 << 16, reserved_blocks=0)
    kv.set_premapped_pages(0, 0)
    eventually(lambda: kv.mapped_bytes() == 0)
    client.set_streams([stream.handle])
    ids = kv.alloc_kv(64)
    assert ids is not None
    stream.submit(kv.k_blocks(0).address + int(ids[0]) * TINY.block_tokens * 512)
    kv.free_kv(ids)
    eventually(lambda: kv.quarantined_bytes() > 0)
    time.sleep(0.05)
    assert kv.quarantined_bytes() == kv.mapped_bytes() == 8 * TINY.quantum_bytes(PAGE)
    stream.complete()
    eventually(lambda: kv.mapped_bytes() == 0)
    client.close()
    stream.close()


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_capture_goes_on_beside_kvcached(
    client: Client, libcuda: LibCuda, own_stream: bool
) -> None:
    """Avoids event queries, which end a capture in CUDA's default mode, from any thread."""
    cu, graph, work = libcuda.library, ctypes.c_void_p(), CudaStream(libcuda)
    made = ctypes.c_void_p()
    work.answer(lambda: cu.cuStreamCreate(ctypes.byref(made), NON_BLOCKING))
    kv = client.alloc_kvcache(TINY, 1 << 16, reserved_blocks=0)
    kv.set_premapped_pages(0, 0)
    client.set_streams([made.value or 0 if own_stream else work.handle])
    ids = kv.alloc_kv(64)
    assert ids is not None
    work.answer(lambda: cu.cuStreamBeginCapture_v2(made, CAPTURED_GLOBALLY))
    libcuda.reset()
    kv.free_kv(ids)
    if own_stream:
        # Nothing may be recorded into the graph: freed pages wait for the capture's end.
        with pytest.raises(PagesInUseError, match="is capturing a graph"):
            kv.trim()
        assert kv.mapped_bytes() == 8 * TINY.quantum_bytes(PAGE)
    else:
        eventually(lambda: kv.mapped_bytes() == 0)
        assert libcuda.calls("cuEventQuery") > 0
    again = kv.alloc_kv(64)
    assert again is not None
    work.answer(lambda: cu.cuStreamEndCapture(made, ctypes.byref(graph)))
    work.answer(lambda: cu.cuGraphDestroy(graph))
    kv.free_kv(again)
    eventually(lambda: kv.mapped_bytes() == 0)
    client.close()
    work.answer(lambda: cu.cuStreamDestroy_v2(made))
    work.close()
