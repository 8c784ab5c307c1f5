"""Strictness of the test libcuda: it must refuse every call that CUDA refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from .driver import (
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_VALUE,
    UNIT,
    Driver,
    open_driver,
    run_with,
)
from .libcuda import LibCuda


@pytest.fixture
def driver(libcuda: LibCuda) -> Iterator[Driver]:
    with open_driver(libcuda) as made:
        yield made


def test_sizes_and_addresses_are_multiples_of_the_granularity(driver: Driver) -> None:
    for size in (0, 1, UNIT - 1, UNIT + 1):
        assert driver.reserve(size)[0] == INVALID_VALUE
        assert driver.create(size)[0] == INVALID_VALUE
        assert "granularity" in driver.refusal()
    assert driver.reserve(UNIT, 3 * UNIT)[0] == INVALID_VALUE
    assert "power of two" in driver.refusal()
    result, address = driver.reserve(UNIT, 1 << 21)
    assert (result, address % (1 << 21)) == (0, 0)
    assert driver.free(address, UNIT) == 0


def test_a_handle_is_mapped_whole_into_reserved_free_addresses(driver: Driver) -> None:
    _, address = driver.reserve(4 * UNIT)
    _, handle = driver.create(2 * UNIT)
    for wrong in (
        (address, UNIT, handle),  # half of it
        (address, 3 * UNIT, handle),
        (address, 2 * UNIT, handle, UNIT),  # an offset
        (address + 3 * UNIT, 2 * UNIT, handle),  # over the end
        (address + 1, 2 * UNIT, handle),
        (1 << 40, 2 * UNIT, handle),  # not reserved
        (address, 2 * UNIT, 999),
    ):
        assert driver.map(*wrong) == INVALID_VALUE, wrong
    assert driver.map(address + UNIT, 2 * UNIT, handle) == 0
    for start in (0, 1, 2):
        assert driver.map(address + start * UNIT, 2 * UNIT, handle) == INVALID_VALUE
        assert "something is mapped there" in driver.refusal()
    assert driver.unmap(address + UNIT, 2 * UNIT) == driver.release(handle) == 0
    assert driver.free(address, 4 * UNIT) == 0


def test_no_access_before_set_access(driver: Driver) -> None:
    _, address = driver.reserve(2 * UNIT)
    _, handle = driver.create(UNIT)
    assert driver.set_access(address, UNIT) == INVALID_VALUE
    assert driver.map(address, UNIT, handle) == 0
    assert driver.copy_out(address) == INVALID_VALUE
    assert driver.set_access(address, 2 * UNIT) == INVALID_VALUE  # a hole in the range
    assert driver.set_access(address, UNIT, device=0) == INVALID_DEVICE
    assert driver.set_access(address, UNIT) == driver.copy_out(address) == 0
    assert driver.copy_out(address + UNIT) == INVALID_VALUE
    assert driver.unmap(address, UNIT) == driver.release(handle) == 0
    assert driver.copy_out(address) == INVALID_VALUE
    assert driver.free(address, 2 * UNIT) == 0


def test_unmap_takes_whole_mappings(driver: Driver) -> None:
    _, address = driver.reserve(5 * UNIT)
    pair, single = driver.create(2 * UNIT)[1], driver.create(UNIT)[1]
    assert driver.map(address, 2 * UNIT, pair) == 0
    assert driver.map(address + 2 * UNIT, UNIT, single) == 0
    for start, size in ((0, 1), (1, 1), (1, 2), (0, 4), (3, 1), (0, 0)):
        assert driver.unmap(address + start * UNIT, size * UNIT) == INVALID_VALUE, (start, size)
        assert "whole mappings" in driver.refusal()
    assert driver.free(address, 5 * UNIT) == INVALID_VALUE
    assert "something is mapped" in driver.refusal()
    assert driver.unmap(address, 3 * UNIT) == 0
    assert driver.free(address, 4 * UNIT) == INVALID_VALUE
    assert driver.free(address, 5 * UNIT) == 0
    assert driver.free(address, 5 * UNIT) == INVALID_VALUE
    assert driver.release(pair) == driver.release(single) == 0


def test_memory_lives_until_released_and_unmapped(driver: Driver, libcuda: LibCuda) -> None:
    _, address = driver.reserve(UNIT)
    _, handle = driver.create(UNIT)
    assert driver.map(address, UNIT, handle) == driver.release(handle) == 0
    assert libcuda.used_bytes(1) == UNIT
    assert driver.release(handle) == INVALID_VALUE
    assert "released before" in driver.refusal()
    assert driver.unmap(address, UNIT) == 0
    assert libcuda.used_bytes(1) == 0
    assert driver.map(address, UNIT, handle) == INVALID_VALUE
    assert driver.free(address, UNIT) == 0


def test_devices_contexts_and_properties(driver: Driver) -> None:
    count = ctypes.c_int()
    assert driver.cu.cuDeviceGetCount(ctypes.byref(count)) == 0
    assert count.value == 2
    assert driver.cu.cuDeviceGet(ctypes.byref(count), 2) == INVALID_DEVICE
    assert driver.create(UNIT, device=2)[0] == INVALID_DEVICE
    assert driver.create(UNIT, kind=0)[0] == INVALID_VALUE
    current = ctypes.c_void_p()
    assert driver.cu.cuCtxPopCurrent_v2(ctypes.byref(current)) == 0
    assert driver.create(UNIT)[0] == INVALID_CONTEXT
    assert driver.cu.cuCtxPushCurrent_v2(current) == 0


def test_the_chosen_calls_fail(driver: Driver, libcuda: LibCuda) -> None:
    libcuda.reset()
    libcuda.fail_at(2, 2, error=LibCuda.OUT_OF_MEMORY)
    assert [driver.create(1)[0] for _ in range(4)] == [INVALID_VALUE, 2, 2, INVALID_VALUE]
    assert (libcuda.calls("cuMemCreate"), libcuda.calls()) == (4, 4)


LEAK = """
cu.cuInit(0)
cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cu.cuCtxPushCurrent_v2(context)
print(cu.cuMemAddressReserve(ctypes.byref(address), *u64(PAGE, 0, 0, 0)))
"""


@pytest.mark.parametrize(("wanted", "status"), [("", 0), ("report", 0), ("fail", 97)])
def test_leaks_are_reported_at_the_end(libcuda: LibCuda, wanted: str, status: int) -> None:
    env = {"KVCACHED_TEST_CUDA_LEAKS": wanted} if wanted else {}
    done = run_with(libcuda, LEAK, **env)
    assert (done.returncode, done.stdout) == (status, "0\n")
    leaked = "leaked 0 allocations, 0 mappings, 1 reservations, 1 contexts"
    assert (leaked in done.stderr) == bool(wanted)


def test_the_environment_chooses_a_failure(libcuda: LibCuda) -> None:
    assert run_with(libcuda, LEAK, KVCACHED_TEST_CUDA_FAIL_AT="1").stdout == "1\n"


def test_nothing_works_before_init_or_after_a_fork(libcuda: LibCuda) -> None:
    code = """
count = ctypes.c_int()
print(cu.cuDeviceGetCount(ctypes.byref(count)), flush=True)
cu.cuInit(0)
if os.fork() == 0:
    print(cu.cuInit(0), cu.cuDeviceGetCount(ctypes.byref(count)), flush=True)
    os._exit(0)
os.wait()
print(cu.cuDeviceGetCount(ctypes.byref(count)))
"""
    assert run_with(libcuda, code).stdout.split() == ["3", "3", "3", "0"]
