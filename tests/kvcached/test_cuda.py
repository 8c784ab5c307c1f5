"""CUDA backend on the test libcuda: its driver calls, and their failures."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvcached import Client, Device, KVCache, Layout, errors

from .arrays import as_array
from .conftest import CAPACITY, PAGE, TINY
from .libcuda import LibCuda

BLOCKS_PER_SLAB = TINY.slab_tokens(PAGE) // TINY.block_tokens
QUANTUM = TINY.quantum_bytes(PAGE)
DEEP = replace(TINY, num_layers=32)


@pytest.fixture
def device_name() -> str:
    return "cuda:0"


@pytest.fixture
def client(device: Device, libcuda: LibCuda) -> Iterator[Client]:
    used_before = libcuda.used_bytes()
    with device.client("test", background=False) as opened:
        yield opened
        libcuda.pass_all()
    assert libcuda.used_bytes() == used_before


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def open_and_use(namespace: str, capacity_bytes: int = CAPACITY, page_bytes: int = PAGE) -> str:
    """Returns a program that maps its whole device and prints the error."""
    return f"""
import kvcached
device = kvcached.Device.open(
    "cuda:0", capacity_bytes={capacity_bytes}, page_bytes={page_bytes}, namespace="{namespace}")
try:
    client = device.client("other")
    tensor = client.alloc_virtual_tensor({capacity_bytes})
    tensor.map(0, {capacity_bytes})
except kvcached.KvcachedError as error:
    print(type(error).__name__, error)
device.destroy(force=True)
"""


def test_without_a_driver_the_message_says_what_to_install(
    libcuda: LibCuda, monkeypatch: pytest.MonkeyPatch, device_name: str
) -> None:
    for path, error, says, do in (
        ("libnot-there.so.1", errors.NoDriverError, "libnot-there", "install the driver"),
        (
            "libm.so.6",
            errors.DriverTooOldError,
            "too old: .*no cuInit",
            "install the driver of CUDA 11",
        ),
    ):
        monkeypatch.setenv("KVCACHED_LIBCUDA", path)
        with pytest.raises(error, match=says) as refused:
            Device.open(device_name, capacity_bytes=CAPACITY)
        assert isinstance(refused.value, errors.BackendUnavailableError)
        assert do in str(refused.value)
        assert "'host:0'" in str(refused.value)


def test_only_a_gpu_loads_the_driver(device: Device, namespace: str) -> None:
    code = f"""
import kvcached
def loaded(): print("libcuda" in open("/proc/self/maps").read())
loaded()
kvcached.Device.open("host:0", capacity_bytes=1 << 20, page_bytes=1 << 16, namespace="{namespace}")
loaded()
kvcached.Device.open("cuda:0", namespace="{namespace}")
loaded()
kvcached.Device.unlink("{namespace}", "host:0")
"""
    assert run_python(code).stdout.split() == ["False", "False", "True"]


def test_gpus_that_do_not_exist(libcuda: LibCuda, namespace: str, device_name: str) -> None:
    device = Device.open("cuda:7", capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace)
    with pytest.raises(errors.UnknownDeviceError, match=r"'cuda:7'.*cuda:0 to cuda:1"):
        device.client("a")
    assert device.usage().clients == ()
    device.destroy()
    none = run_python(open_and_use(namespace), KVCACHED_TEST_CUDA_DEVICES="0")
    assert none.stdout.startswith("NoDriverError"), none.stderr
    assert "CUDA_ERROR_NO_DEVICE (100)" in none.stdout


def test_pages_are_of_the_drivers_granularity(libcuda: LibCuda, namespace: str) -> None:
    refused = run_python(open_and_use(namespace), KVCACHED_TEST_CUDA_GRANULARITY=str(2 << 20))
    assert refused.stdout.startswith("AlignmentError page_bytes 65536"), refused.stderr
    assert "2097152" in refused.stdout
    code = open_and_use(namespace, page_bytes=4 << 20)
    granted = run_python(code, KVCACHED_TEST_CUDA_GRANULARITY=str(2 << 20))
    assert (granted.stdout, granted.returncode) == ("", 0), granted.stderr


def test_two_gpus(device: Device, client: Client, libcuda: LibCuda, namespace: str) -> None:
    other = Device.open("cuda:1", capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace)
    with other.client("test") as neighbour:
        first = client.alloc_virtual_tensor(4 * PAGE)
        first.map(0, 2 * PAGE)
        tensor = neighbour.alloc_virtual_tensor(4 * PAGE)
        tensor.map(0, 3 * PAGE)
        assert (libcuda.used_bytes(0), libcuda.used_bytes(1)) == (2 * PAGE, 3 * PAGE)
        assert tensor.__dlpack_device__() == (2, 1)
    assert libcuda.used_bytes(1) == 0
    other.destroy()


def test_tensors_say_which_gpu_they_are_on(client: Client) -> None:
    kv = client.alloc_kvcache(TINY, 1 << 10)
    view = kv.k_buffer(0)
    assert view.__dlpack_device__() == (2, 0)
    assert view.__dlpack__(dl_device=(2, 0)) is not None
    for wanted in ((1, 0), (2, 1)):
        with pytest.raises(BufferError, match="on that GPU"):
            view.__dlpack__(dl_device=wanted)
    with pytest.raises((BufferError, RuntimeError)):  # numpy has no GPU memory
        np.from_dlpack(view)


def test_resident_is_what_is_committed(device: Device, client: Client, libcuda: LibCuda) -> None:
    tensor = client.alloc_virtual_tensor(4 * PAGE)
    tensor.map(0, 3 * PAGE)
    assert device.resident_bytes() == 3 * PAGE == libcuda.used_bytes()


def state(device: Device, kv: KVCache, libcuda: LibCuda) -> tuple[object, ...]:
    kv.check_integrity()
    usage = device.usage()
    books = (usage.reserved_bytes, usage.committed_bytes, libcuda.used_bytes())
    return (kv.mapped_bytes(), kv.live_blocks(), *books)


def alloc_or_error(kv: KVCache, num_blocks: int) -> tuple[np.ndarray | None, str]:
    try:
        return kv.alloc_kv(num_blocks), ""
    except errors.SystemCallError as error:
        return None, str(error)


@pytest.mark.parametrize("spares", [0, 4])
def test_a_failing_call_at_any_point_of_alloc_leaves_nothing_behind(
    device: Device, client: Client, libcuda: LibCuda, spares: int
) -> None:
    kv = client.alloc_kvcache(TINY, 1 << 16)
    kv.set_spare_pages(spares, spares)
    held = kv.alloc_kv(BLOCKS_PER_SLAB - 1)
    marks = as_array(kv.k_buffer(1))[: PAGE // TINY.k_token_bytes]
    marks[:] = 3
    before, failures = state(device, kv, libcuda), 0
    while True:
        libcuda.fail_at(failures + 1)
        ids, refused = alloc_or_error(kv, 2 * BLOCKS_PER_SLAB)
        libcuda.pass_all()
        if ids is not None:
            break
        failures += 1
        assert "CUDA_ERROR_INVALID_VALUE (1): invalid argument" in refused
        kv.trim()
        assert state(device, kv, libcuda) == before
        assert (marks == 3).all()
    # Two slabs of one page in each of 4 buffers: 8 creates, 8 maps, 4 times access.
    assert failures == 20
    assert as_array(kv.v_buffer(1))[ids * TINY.block_tokens].shape == (len(ids), 2, 64)
    kv.free_kv(np.concatenate([ids, held]))
    kv.trim()
    assert kv.mapped_bytes() == kv.floor_bytes() == libcuda.used_bytes()


def test_a_failing_call_at_any_point_of_free_keeps_the_pages_charged(
    device: Device, client: Client, libcuda: LibCuda
) -> None:
    kv = client.alloc_kvcache(TINY, 1 << 16)
    for nth in range(1, 9):  # 4 unmaps, 4 releases
        ids = kv.alloc_kv(2 * BLOCKS_PER_SLAB - 1)
        libcuda.fail_at(nth)
        kv.free_kv(ids)
        libcuda.pass_all()
        assert kv.live_blocks() == 0
        # A release that fails half way leaves handles without memory, charged until the next trim.
        assert libcuda.used_bytes() <= device.usage().committed_bytes == 2 * QUANTUM
        kv.trim()
        assert libcuda.used_bytes() == device.usage().committed_bytes == QUANTUM


def test_a_failed_rollback_is_reported_and_repaired_at_the_end(
    device: Device, client: Client, libcuda: LibCuda
) -> None:
    kv = client.alloc_kvcache(TINY, 1 << 16)
    libcuda.fail_at(6, 2)  # of 4 creates and 4 x (map, access): the first access and its undoing
    with pytest.raises(errors.StrandedPagesError, match="could not be undone"):
        kv.alloc_kv(BLOCKS_PER_SLAB)
    libcuda.pass_all()
    assert device.usage().committed_bytes == libcuda.used_bytes() == 2 * QUANTUM
    assert kv.alloc_kv(BLOCKS_PER_SLAB) is not None


def test_a_full_gpu_is_no_room(device: Device, client: Client, libcuda: LibCuda) -> None:
    kv = client.alloc_kvcache(TINY, 1 << 16)
    before = state(device, kv, libcuda)
    client.set_create_wait(0)
    libcuda.fail_at(3, error=LibCuda.OUT_OF_MEMORY)
    assert kv.alloc_kv(BLOCKS_PER_SLAB) is None
    assert state(device, kv, libcuda) == before
    assert kv.alloc_kv(BLOCKS_PER_SLAB) is not None


def test_a_gpu_that_is_full_for_a_moment_is_asked_again(
    device: Device, client: Client, libcuda: LibCuda
) -> None:
    """Covers the time that the driver needs to free a dead process's memory."""
    client.set_create_wait(60)
    for nth in range(1, 5):  # 4 creates; the pages made before the failure go back each time
        kv = client.alloc_kvcache(TINY, 1 << 12, reserved_blocks=0)
        libcuda.fail_at(nth, error=LibCuda.OUT_OF_MEMORY)
        assert kv.alloc_kv(BLOCKS_PER_SLAB) is not None
        assert device.usage().committed_bytes == QUANTUM == libcuda.used_bytes()
        client.free_kvcache(kv)
    with pytest.raises(errors.InvalidArgumentError, match="max_wait_s"):
        client.set_create_wait(-1)


def test_memory_outside_the_ledger_is_no_room(libcuda: LibCuda, namespace: str) -> None:
    wait = "    client.set_create_wait(0.5)\n"
    code = open_and_use(namespace).replace("    tensor =", wait + "    tensor =", 1)
    refused = run_python(code, KVCACHED_TEST_CUDA_BYTES=str(CAPACITY // 2))
    assert refused.stdout.startswith("NoRoomError cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2)")
    assert "tries in 500 ms" in refused.stdout
    assert "used outside of the ledger. End the processes that hold it" in refused.stdout


def test_a_gpu_that_stays_full_holds_up_the_first_create_alone(
    device: Device, client: Client, libcuda: LibCuda
) -> None:
    kv = client.alloc_kvcache(TINY, 1 << 16, reserved_blocks=0)
    client.set_create_wait(0.1)
    libcuda.reset()
    libcuda.fail_at(1, times=1 << 30, error=LibCuda.OUT_OF_MEMORY)
    assert kv.alloc_kv(BLOCKS_PER_SLAB) is None
    assert libcuda.calls("cuMemCreate") > 1
    for _ in range(3):
        libcuda.reset()
        assert kv.alloc_kv(BLOCKS_PER_SLAB) is None
        assert libcuda.calls("cuMemCreate") == 1
    libcuda.pass_all()
    assert kv.alloc_kv(BLOCKS_PER_SLAB) is not None
    libcuda.reset()
    libcuda.fail_at(1, error=LibCuda.OUT_OF_MEMORY)  # one success does not restore the wait
    assert kv.alloc_kv(BLOCKS_PER_SLAB) is None
    time.sleep(8 * 0.1)  # eight waits without a refusal
    libcuda.reset()
    libcuda.fail_at(1, error=LibCuda.OUT_OF_MEMORY)  # fails for a moment only
    assert kv.alloc_kv(BLOCKS_PER_SLAB) is not None


def calls_of(libcuda: LibCuda, kv: KVCache, num_blocks: int) -> tuple[dict[str, int], ...]:
    """Returns the driver calls of an alloc and of the free after it."""
    libcuda.reset()
    ids = kv.alloc_kv(num_blocks)
    alloc = libcuda.count()
    libcuda.reset()
    assert ids is not None
    kv.free_kv(ids)
    return alloc, libcuda.count()


def test_driver_calls_of_a_page_step_per_layer(client: Client, libcuda: LibCuda) -> None:
    """Grows a model of 32 layers by 64 pages: K and V of each layer."""
    kv = client.alloc_kvcache(DEEP, 1 << 16, reserved_blocks=0)
    alloc, free = calls_of(libcuda, kv, BLOCKS_PER_SLAB)
    assert alloc == {"Create": 64, "Map": 64, "SetAccess": 64}
    assert free == {"Unmap": 64, "Release": 64}
    # Two steps at once share the calls that take ranges.
    alloc, free = calls_of(libcuda, kv, 2 * BLOCKS_PER_SLAB)
    assert alloc == {"Create": 128, "Map": 128, "SetAccess": 64}
    assert free == {"Unmap": 64, "Release": 128}
    # Handles that are kept cost no create; blocks on mapped pages cost nothing.
    kv.set_spare_pages(64, 64)
    calls_of(libcuda, kv, BLOCKS_PER_SLAB)
    assert calls_of(libcuda, kv, BLOCKS_PER_SLAB) == ({"Map": 64, "SetAccess": 64}, {"Unmap": 64})
    assert kv.alloc_kv(1) is not None
    assert calls_of(libcuda, kv, BLOCKS_PER_SLAB - 1) == ({}, {})


def run_kv_cache(namespace: str, end: str) -> str:
    """Returns a program that allocates KV blocks and then runs `end`."""
    return f"""
import ctypes, os, kvcached
device = kvcached.Device.open(
    "cuda:0", capacity_bytes=1 << 20, page_bytes=1 << 16, namespace="{namespace}")
client = device.client("a")
kv = client.alloc_kvcache(kvcached.Layout(num_layers=2, num_kv_heads=2, head_dim=64), 4096)
kv.alloc_kv(3)
{end}
"""


def test_a_closed_client_leaves_nothing_in_the_driver(libcuda: LibCuda, namespace: str) -> None:
    code = run_kv_cache(namespace, "client.close(); del kv, client; device.destroy()")
    done = run_python(code, KVCACHED_TEST_CUDA_LEAKS="fail")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_driver_that_shut_down_first_has_given_all_back(libcuda: LibCuda, namespace: str) -> None:
    shut_down = f"""
cuda = ctypes.CDLL(os.environ["KVCACHED_LIBCUDA"])
cuda.test_cuda_fail_at(*[ctypes.c_uint64(n) for n in (1, 1000)], {LibCuda.DEINITIALIZED})
client.close()
print(device.usage().clients)
device.destroy()
"""
    done = run_python(run_kv_cache(namespace, shut_down))
    assert (done.stdout, done.stderr) == ("()\n", "")


def test_layouts_of_other_types(client: Client) -> None:
    layout = Layout(num_layers=2, num_kv_heads=1, head_dim=64, dtype="bfloat16")
    kv = client.alloc_kvcache(layout, 1 << 12)
    assert kv.k_buffer(0).dtype == "bfloat16"
    assert kv.k_buffer(0).__dlpack_device__() == (2, 0)
