"""Stream capture on the test libcuda: the recorded work, and the calls that break a capture."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from .driver import INVALID_VALUE, MEGABYTE, UNIT, Driver, mapped, open_driver, run_with, u64
from .libcuda import LibCuda

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
NONE, ACTIVE, INVALIDATED = 0, 1, 2
ILLEGAL_STATE, ILLEGAL_ADDRESS = 401, 700
UNSUPPORTED, INVALID, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED, WRONG_THREAD = (
    range(900, 909)
)
BLOCKING, NON_BLOCKING = 0, 1


class Capturing:
    """A driver with streams, events and captures."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.cu = driver.cu
        self.streams: list[ctypes.c_void_p] = []
        self.events: list[ctypes.c_void_p] = []

    def stream(self, flags: int = NON_BLOCKING) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        assert self.cu.cuStreamCreate(ctypes.byref(made), flags) == 0
        self.streams.append(made)
        return made

    def event(self) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        assert self.cu.cuEventCreate(ctypes.byref(made), 2) == 0
        self.events.append(made)
        return made

    def begin(self, stream: ctypes.c_void_p, mode: int = GLOBAL) -> int:
        return self.cu.cuStreamBeginCapture_v2(stream, mode)

    def end(self, stream: ctypes.c_void_p) -> tuple[int, ctypes.c_void_p]:
        graph = ctypes.c_void_p()
        return self.cu.cuStreamEndCapture(stream, ctypes.byref(graph)), graph

    def end_whole(self, stream: ctypes.c_void_p) -> int:
        """Ends a capture and drops its graph."""
        result, graph = self.end(stream)
        assert (graph.value is not None) == (result == 0)
        if result == 0:
            assert self.cu.cuGraphDestroy(graph) == 0
        return result

    def status(self, stream: ctypes.c_void_p) -> int:
        status = ctypes.c_int()
        assert self.cu.cuStreamIsCapturing(stream, ctypes.byref(status)) == 0
        return status.value

    def mode(self, mode: int) -> int:
        """Sets this thread's mode and returns the previous one."""
        value = ctypes.c_int(mode)
        assert self.cu.cuThreadExchangeStreamCaptureMode(ctypes.byref(value)) == 0
        return value.value

    def set(self, stream: ctypes.c_void_p, address: int, value: int, size: int = UNIT) -> int:
        return self.cu.cuMemsetD8Async(*u64(address), ctypes.c_ubyte(value), *u64(size), stream)

    def elsewhere(self, call: Callable[[], int]) -> int:
        """Makes the call in another thread, in the same context."""

        def run() -> int:
            other = Driver.__new__(Driver)
            context = ctypes.c_void_p()
            assert self.cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), self.driver.device) == 0
            assert self.cu.cuCtxPushCurrent_v2(context) == 0
            other.cu, other.device = self.cu, self.driver.device
            try:
                return call()
            finally:
                other.leave()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run).result()

    def close(self) -> None:
        for event in self.events:
            assert self.cu.cuEventDestroy_v2(event) == 0
        for stream in self.streams:
            assert self.cu.cuStreamDestroy_v2(stream) == 0


@pytest.fixture
def capturing(libcuda: LibCuda) -> Iterator[Capturing]:
    with open_driver(libcuda) as driver:
        made = Capturing(driver)
        yield made
        made.close()


@pytest.fixture
def address(capturing: Capturing) -> Iterator[int]:
    with mapped(capturing.driver) as (found, _):
        assert capturing.driver.fill(found, 1, UNIT) == 0
        yield found
        assert capturing.cu.cuCtxSynchronize() == 0


def test_captured_work_is_done_at_the_launch_alone(capturing: Capturing, address: int) -> None:
    c, stream = capturing, capturing.stream()
    assert c.status(stream) == NONE
    assert c.begin(stream) == 0
    assert c.status(stream) == ACTIVE
    assert c.set(stream, address, 2) == c.set(stream, address, 3, 1) == 0
    result, graph = c.end(stream)
    assert (result, c.status(stream), c.driver.read(address, 2)) == (0, NONE, b"\x01\x01")
    instance = ctypes.c_void_p()
    assert c.cu.cuGraphLaunch(graph, stream) == 400
    assert c.cu.cuGraphInstantiateWithFlags(ctypes.byref(instance), graph, *u64(0)) == 0
    assert c.cu.cuGraphDestroy(graph) == 0
    for _ in range(2):
        assert c.cu.cuGraphLaunch(instance, stream) == c.cu.cuStreamSynchronize(stream) == 0
        assert c.driver.read(address, 2) == b"\x03\x02"
        assert c.driver.fill(address, 9, UNIT) == 0
    assert c.cu.cuGraphExecDestroy(instance) == 0
    assert c.cu.cuGraphLaunch(instance, stream) == 400


def test_a_graph_follows_its_addresses(capturing: Capturing) -> None:
    """Pages under a captured address may be exchanged. The launch fails where there are none."""
    c, driver, stream = capturing, capturing.driver, capturing.stream()
    address = driver.reserve(UNIT)[1]
    pages = [driver.create(UNIT)[1] for _ in range(2)]
    assert driver.map(address, UNIT, pages[0]) == driver.set_access(address, UNIT) == 0
    assert c.begin(stream) == c.set(stream, address, 4) == 0
    graph, instance = c.end(stream)[1], ctypes.c_void_p()
    assert c.cu.cuGraphInstantiateWithFlags(ctypes.byref(instance), graph, *u64(0)) == 0
    assert driver.unmap(address, UNIT) == 0
    assert c.cu.cuGraphLaunch(instance, stream) == ILLEGAL_ADDRESS
    assert driver.map(address, UNIT, pages[1]) == driver.set_access(address, UNIT) == 0
    assert c.cu.cuGraphLaunch(instance, stream) == c.cu.cuStreamSynchronize(stream) == 0
    assert driver.read(address, UNIT) == b"\x04" * UNIT
    assert c.cu.cuGraphExecDestroy(instance) == c.cu.cuGraphDestroy(graph) == 0
    assert driver.unmap(address, UNIT) == driver.free(address, UNIT) == 0
    assert [driver.release(page) for page in pages] == [0, 0]


def query(c: Capturing) -> int:
    return c.cu.cuEventQuery(c.event())


UNSAFE: dict[str, Callable[[Capturing], int]] = {
    "cuEventQuery": query,
    "cuEventSynchronize": lambda c: c.cu.cuEventSynchronize(c.event()),
    "cuStreamQuery": lambda c: c.cu.cuStreamQuery(c.stream()),
    "cuStreamQuery, default": lambda c: c.cu.cuStreamQuery(None),
    "cuStreamSynchronize": lambda c: c.cu.cuStreamSynchronize(c.stream()),
    "cuCtxSynchronize": lambda c: c.cu.cuCtxSynchronize(),
    "cuMemAlloc": lambda c: c.driver.allocate(0)[0],
    "cuMemFree": lambda c: c.driver.free_plain(0),
    "cuMemAllocHost": lambda c: c.cu.cuMemAllocHost_v2(ctypes.byref(ctypes.c_void_p()), *u64(0)),
    "cuMemFreeHost": lambda c: c.cu.cuMemFreeHost(None),
    "cuMemcpyDtoH": lambda c: c.driver.copy_out(0),
    "cuMemcpyHtoD": lambda c: c.cu.cuMemcpyHtoD_v2(*u64(0), b"x", *u64(1)),
    "cuMemsetD8": lambda c: c.driver.fill(0, 0, 1),
}


@pytest.mark.parametrize("call", UNSAFE)
def test_unsafe_calls_break_a_capture_of_any_thread(call: str, capturing: Capturing) -> None:
    c, stream = capturing, capturing.stream()
    for run in (lambda: UNSAFE[call](c), lambda: c.elsewhere(lambda: UNSAFE[call](c))):
        assert c.begin(stream) == 0
        assert run() == UNSUPPORTED
        assert "unsafe" in c.driver.refusal()
        assert c.status(stream) == INVALIDATED
        assert c.end_whole(stream) == INVALID
        assert c.status(stream) == NONE
    assert UNSAFE[call](c) != UNSUPPORTED


@pytest.mark.parametrize("own_mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("capture_mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("is_other_thread", [False, True])
def test_modes(
    capturing: Capturing, own_mode: int, capture_mode: int, is_other_thread: bool
) -> None:
    """Follows the table in the documentation of cuThreadExchangeStreamCaptureMode."""
    c, stream = capturing, capturing.stream()
    if is_other_thread:
        allowed = own_mode != GLOBAL or capture_mode != GLOBAL
    else:
        allowed = RELAXED in (own_mode, capture_mode)

    def call() -> int:
        before = c.mode(own_mode)
        result = query(c)
        assert c.mode(before) == own_mode
        return result

    assert c.begin(stream, capture_mode) == 0
    assert (c.elsewhere(call) if is_other_thread else call()) == (0 if allowed else UNSUPPORTED)
    assert c.end_whole(stream) == (0 if allowed else INVALID)


def test_modes_that_are_none(capturing: Capturing) -> None:
    mode = ctypes.c_int(3)
    assert capturing.cu.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == INVALID_VALUE
    assert capturing.begin(capturing.stream(), 3) == INVALID_VALUE


DEFAULT_STREAM: dict[str, Callable[[Capturing, int], int]] = {
    "cuMemcpyDtoH": lambda c, address: c.driver.copy_out(address),
    "cuMemsetD8": lambda c, address: c.driver.fill(address, 0, 1),
    "cuStreamSynchronize": lambda c, _: c.cu.cuStreamSynchronize(None),
    "cuMemsetD8Async": lambda c, address: c.set(ctypes.c_void_p(), address, 0),
    "cuEventRecord": lambda c, _: c.cu.cuEventRecord(c.event(), None),
    "cuCtxSynchronize": lambda c, _: c.cu.cuCtxSynchronize(),
}


@pytest.mark.parametrize("call", DEFAULT_STREAM)
def test_the_default_stream_is_unusable_while_a_blocking_stream_captures(
    call: str, capturing: Capturing, address: int
) -> None:
    c, stream = capturing, capturing.stream(BLOCKING)
    assert c.begin(stream, RELAXED) == 0
    assert DEFAULT_STREAM[call](c, address) == IMPLICIT
    assert c.end_whole(stream) == INVALID
    assert DEFAULT_STREAM[call](c, address) == 0
    free = c.stream(NON_BLOCKING)
    assert c.begin(free, RELAXED) == DEFAULT_STREAM[call](c, address) == c.end_whole(free) == 0


def test_asking_for_the_default_streams_state_breaks_nothing(capturing: Capturing) -> None:
    c, stream, status, id_ = capturing, capturing.stream(BLOCKING), ctypes.c_int(), u64(0)[0]
    assert c.begin(stream) == 0
    assert c.cu.cuStreamIsCapturing(None, ctypes.byref(status)) == IMPLICIT
    info = [ctypes.byref(status), ctypes.byref(id_), None, None, None]
    assert c.cu.cuStreamGetCaptureInfo_v2(None, *info) == IMPLICIT
    assert c.cu.cuStreamGetCaptureInfo_v2(stream, *info) == 0
    assert status.value == ACTIVE
    assert id_.value != 0
    assert c.end_whole(stream) == 0
    assert c.cu.cuStreamIsCapturing(None, ctypes.byref(status)) == status.value == 0


@pytest.mark.parametrize("name", ["cuStreamSynchronize", "cuStreamQuery"])
def test_nobody_waits_for_a_capturing_stream(capturing: Capturing, name: str) -> None:
    c, stream = capturing, capturing.stream()
    assert c.begin(stream, RELAXED) == 0
    assert getattr(c.cu, name)(stream) == UNSUPPORTED
    assert c.end_whole(stream) == INVALID


@pytest.mark.parametrize("name", ["cuEventQuery", "cuEventSynchronize"])
def test_nobody_asks_for_a_captured_event(capturing: Capturing, name: str) -> None:
    c, stream, event = capturing, capturing.stream(), capturing.event()
    assert c.begin(stream, RELAXED) == c.cu.cuEventRecord(event, stream) == 0
    assert getattr(c.cu, name)(event) == CAPTURED
    assert c.end_whole(stream) == INVALID
    assert getattr(c.cu, name)(event) == CAPTURED
    assert c.cu.cuEventRecord(event, stream) == getattr(c.cu, name)(event) == 0


def test_an_invalid_capture_takes_no_work(capturing: Capturing, address: int) -> None:
    c, stream = capturing, capturing.stream()
    assert c.begin(stream) == 0
    assert query(c) == UNSUPPORTED
    assert c.set(stream, address, 2) == c.cu.cuEventRecord(c.event(), stream) == INVALID
    assert c.end_whole(stream) == INVALID
    assert c.driver.read(address, 1) == b"\x01"


def test_where_captures_begin_and_end(capturing: Capturing) -> None:
    c, stream, other = capturing, capturing.stream(), capturing.stream()
    assert c.begin(ctypes.c_void_p()) == UNSUPPORTED
    assert c.end(stream)[0] == ILLEGAL_STATE
    assert c.begin(stream) == 0
    assert c.begin(stream) == ILLEGAL_STATE
    assert c.elsewhere(lambda: c.end(stream)[0]) == WRONG_THREAD
    assert fork(c, stream, other) == 0
    assert c.end(other)[0] == UNMATCHED
    assert c.end_whole(stream) == 0
    assert c.begin(stream, RELAXED) == c.elsewhere(lambda: c.end_whole(stream)) == 0


def fork(c: Capturing, from_: ctypes.c_void_p, to: ctypes.c_void_p) -> int:
    """Makes the second stream wait for the first."""
    event = c.event()
    recorded = c.cu.cuEventRecord(event, from_)
    return recorded or c.cu.cuStreamWaitEvent(to, event, 0)


def test_streams_join_a_capture_by_events(capturing: Capturing, address: int) -> None:
    c, stream, other = capturing, capturing.stream(), capturing.stream()
    assert c.begin(stream) == fork(c, stream, other) == 0
    assert c.status(other) == ACTIVE
    assert c.set(other, address, 2) == fork(c, other, stream) == 0
    result, graph = c.end(stream)
    assert (result, c.status(other), c.driver.read(address, 1)) == (0, NONE, b"\x01")
    assert c.cu.cuGraphDestroy(graph) == 0
    assert c.begin(stream) == fork(c, stream, other) == c.set(other, address, 2) == 0
    assert fork(c, other, stream) == c.set(other, address, 3) == 0  # after it had joined
    assert c.end_whole(stream) == UNJOINED


def test_captures_keep_apart(capturing: Capturing) -> None:
    c, stream, other = capturing, capturing.stream(), capturing.stream()
    event = c.event()
    assert c.begin(stream) == c.cu.cuStreamWaitEvent(stream, event, 0) == 0  # never recorded
    assert c.cu.cuEventRecord(event, other) == 0
    assert c.cu.cuStreamWaitEvent(stream, event, 0) == ISOLATION
    assert c.end_whole(stream) == INVALID
    assert c.begin(stream) == c.begin(other) == 0
    assert fork(c, stream, other) == MERGE
    assert c.end_whole(stream) == c.end_whole(other) == INVALID


@contextmanager
def capture(c: Capturing) -> Iterator[ctypes.c_void_p]:
    stream = c.stream()
    assert c.begin(stream) == 0
    yield stream
    assert c.end_whole(stream) == 0


def test_memory_is_mapped_during_a_capture(capturing: Capturing) -> None:
    """Follows CUDA's documentation, which names no call of virtual memory management as unsafe."""
    with capture(capturing), mapped(capturing.driver) as (address, _):
        assert address


def test_or_not_if_a_test_wants_so(libcuda: LibCuda) -> None:
    code = """
driver = Driver(libcuda)
assert cu.cuStreamCreate(ctypes.byref(context), 1) == 0
reserved, handle = driver.reserve(PAGE)[1], driver.create(PAGE)[1]
for call in (lambda: driver.create(PAGE)[0], lambda: driver.map(reserved, PAGE, handle),
             lambda: driver.unmap(reserved, PAGE)):
    assert cu.cuStreamBeginCapture_v2(context, 0) == 0
    print(call(), cu.cuStreamEndCapture(context, ctypes.byref(address)))
"""
    refused = run_with(libcuda, code, KVCACHED_TEST_CUDA_CAPTURE_MAPS="0")
    assert refused.stdout.splitlines() == ["900 901"] * 3, refused.stderr


def test_a_graph_takes_memory_of_the_drivers(libcuda: LibCuda) -> None:
    code = """
driver = Driver(libcuda)
free = driver.free_bytes()
graph, instance = ctypes.c_void_p(), ctypes.c_void_p()
assert cu.cuStreamCreate(ctypes.byref(context), 1) == 0
assert cu.cuStreamBeginCapture_v2(context, 0) == 0
assert cu.cuStreamEndCapture(context, ctypes.byref(graph)) == 0
assert cu.cuGraphInstantiateWithFlags(ctypes.byref(instance), graph, *u64(0)) == 0
print(free - driver.free_bytes())
assert cu.cuGraphInstantiateWithFlags(ctypes.byref(address), graph, *u64(0)) == 2
assert cu.cuGraphExecDestroy(instance) == 0
print(free - driver.free_bytes())
"""
    done = run_with(libcuda, code, KVCACHED_TEST_CUDA_GRAPH_BYTES=str(40 * MEGABYTE))
    assert done.stdout.split() == [str(40 * MEGABYTE), "0"], done.stderr
