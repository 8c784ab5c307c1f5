"""Streams of the test libcuda, which detect memory that is taken from a kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from .driver import UNIT, Driver, open_driver, run_with, u64
from .libcuda import CudaStream, LibCuda

INVALID_VALUE, INVALID_HANDLE, NOT_READY = 1, 400, 600


@dataclass(frozen=True)
class Page:
    """A mapped page with a second address where nothing is mapped."""

    driver: Driver
    address: int
    handle: int

    def is_taken(self) -> bool:
        """Returns whether an unmap takes the page from its kernel."""
        return self.driver.unmap(self.address, UNIT) == INVALID_VALUE


@pytest.fixture
def driver(libcuda: LibCuda) -> Iterator[Driver]:
    with open_driver(libcuda) as made:
        yield made


@pytest.fixture
def stream(driver: Driver, libcuda: LibCuda) -> Iterator[CudaStream]:
    made = CudaStream(libcuda, Driver.DEVICE)
    yield made
    made.close()


@pytest.fixture
def page(driver: Driver) -> Iterator[Page]:
    _, address = driver.reserve(2 * UNIT)
    _, handle = driver.create(UNIT)
    assert driver.map(address, UNIT, handle) == driver.set_access(address, UNIT) == 0
    yield Page(driver, address, handle)
    assert driver.unmap(address, UNIT) == driver.release(handle) == 0
    assert driver.free(address, 2 * UNIT) == 0


def test_an_unmap_under_a_kernel_is_a_violation(
    page: Page, stream: CudaStream, libcuda: LibCuda
) -> None:
    before = libcuda.violations()
    stream.submit(page.address, 1)
    stream.submit(page.address + UNIT - 1, 1)
    assert page.is_taken()
    assert "event has not passed" in libcuda.refusal()
    stream.complete()
    assert page.is_taken()
    stream.complete()
    assert libcuda.violations() == before + 2


def test_memory_under_a_kernel_is_neither_mapped_elsewhere_nor_filled(
    page: Page, stream: CudaStream, libcuda: LibCuda
) -> None:
    before = libcuda.violations()
    stream.submit(page.address, UNIT)
    assert page.driver.map(page.address + UNIT, UNIT, page.handle) == INVALID_VALUE
    assert "elsewhere" in libcuda.refusal()
    zero = ctypes.c_ubyte(0)
    assert page.driver.cu.cuMemsetD8_v2(*u64(page.address), zero, *u64(UNIT)) == INVALID_VALUE
    assert libcuda.violations() == before + 2
    stream.complete()
    assert page.driver.map(page.address + UNIT, UNIT, page.handle) == 0
    assert page.driver.unmap(page.address + UNIT, UNIT) == 0


def test_a_memset_is_not_waited_for(page: Page, stream: CudaStream, libcuda: LibCuda) -> None:
    """Waits at a copy to the host, for the default stream and no other one."""
    driver, before = page.driver, libcuda.violations()
    assert driver.fill(page.address, 1, UNIT) == 0
    assert driver.start_fill(page.address, 2, UNIT) == driver.start_fill(page.address, 3, 1) == 0
    assert page.is_taken()
    assert driver.read(page.address, 2) == b"\x03\x02"
    handle, value = ctypes.c_void_p(stream.handle), ctypes.c_ubyte(4)
    assert driver.cu.cuMemsetD8Async(*u64(page.address), value, *u64(UNIT), handle) == 0
    assert page.is_taken()
    assert driver.start_fill(page.address, 5, UNIT) == INVALID_VALUE
    assert "of another stream" in libcuda.refusal()
    assert driver.read(page.address, 1) == b"\x03"
    assert driver.cu.cuCtxSynchronize() == 0
    assert driver.read(page.address, 1) == b"\x04"
    assert libcuda.violations() == before + 3


def test_a_kernel_touches_what_is_accessible(page: Page, stream: CudaStream) -> None:
    with pytest.raises(AssertionError):
        stream.submit(page.address + UNIT, 1)
    with pytest.raises(AssertionError):
        stream.submit(page.address, UNIT + 1)


def query(driver: Driver, event: ctypes.c_void_p) -> int:
    return driver.cu.cuEventQuery(event)


def test_events_follow_their_stream(page: Page, stream: CudaStream, libcuda: LibCuda) -> None:
    driver, event = page.driver, ctypes.c_void_p()
    assert driver.cu.cuEventCreate(ctypes.byref(event), 2) == 0
    assert query(driver, event) == 0  # never recorded
    stream.submit(page.address)
    handle = ctypes.c_void_p(stream.handle)
    assert driver.cu.cuEventRecord(event, handle) == 0
    assert query(driver, event) == NOT_READY
    stream.submit(page.address)
    stream.complete()
    assert query(driver, event) == 0
    assert driver.cu.cuEventRecord(event, handle) == 0
    assert query(driver, event) == NOT_READY
    assert driver.cu.cuStreamSynchronize(handle) == query(driver, event) == 0
    assert "1 streams, 1 events" in libcuda.leaks()
    assert driver.cu.cuEventDestroy_v2(event) == 0
    assert driver.cu.cuEventDestroy_v2(event) == query(driver, event) == INVALID_HANDLE


def test_streams_and_events_of_another_device_are_refused(driver: Driver, libcuda: LibCuda) -> None:
    other, event = CudaStream(libcuda, 0), ctypes.c_void_p()
    assert driver.cu.cuEventCreate(ctypes.byref(event), 2) == 0
    for handle in (other.handle, 12345):
        assert driver.cu.cuEventRecord(event, ctypes.c_void_p(handle)) == INVALID_HANDLE
    assert driver.cu.cuEventDestroy_v2(event) == 0
    other.close()


ASK = """
from tests.kvcached.libcuda import CudaStream
stream, event = CudaStream(libcuda), ctypes.c_void_p()
driver = Driver(libcuda, 0)
_, address = driver.reserve(PAGE)
_, handle = driver.create(PAGE)
assert driver.map(address, PAGE, handle) == driver.set_access(address, PAGE) == 0
for _ in range(3):
    stream.submit(address)
assert cu.cuEventCreate(ctypes.byref(event), 2) == 0
assert cu.cuEventRecord(event, ctypes.c_void_p(stream.handle)) == 0
print(*(cu.cuEventQuery(event) for _ in range(5)))
"""


@pytest.mark.parametrize(("progress", "answers"), [("0", [NOT_READY] * 5), ("1", [NOT_READY] * 3)])
def test_work_goes_on_while_one_asks_where_a_test_wants_it(
    libcuda: LibCuda, progress: str, answers: list[int]
) -> None:
    done = run_with(libcuda, ASK, KVCACHED_TEST_CUDA_PROGRESS=progress)
    assert done.returncode == 0, done.stderr
    assert [int(word) for word in done.stdout.split()] == answers + [0] * (5 - len(answers))
