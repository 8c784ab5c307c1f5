"""Part of the step "probe": calls that break the capture of a graph, from this thread or another.

kvcached's keeper thread queries events and maps pages at any time, also during a capture. It is in
relaxed mode, and must not break the capture.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lab.gpu_check.driver import NON_BLOCKING, NOT_READY, Driver, u64
from lab.gpu_check.report import Report
from lab.gpu_check.sizes import PAGE_BYTES

MODES = {"global": 0, "thread_local": 1, "relaxed": 2}
Call = Callable[[], int]
Where = Callable[[Driver, Call], int]


def check(driver: Driver, report: Report) -> None:
    """Makes every call in every situation. Raises RuntimeError if a call of a thread in relaxed
    mode fails or breaks the capture."""
    answers: dict[str, list[int]] = {}
    page, tidy = page_calls(driver)
    own = _keeper_calls(driver) | {"a page": page}

    def captured(call: Call, mode: str, where: Where, flags: int = NON_BLOCKING) -> list[int]:
        answer = _captured(driver, mode, call, where, flags)
        tidy()
        return answer

    for name, call in (own | _other_calls(driver)).items():
        for mode in MODES:
            answers[f"{name}, {mode}, same thread"] = captured(call, mode, _here)
            answers[f"{name}, {mode}, other thread"] = captured(call, mode, _elsewhere)
        answers[f"{name}, global, relaxed thread"] = captured(call, "global", _elsewhere_relaxed)
        blocking = captured(call, "global", _elsewhere, flags=0)
        answers[f"{name}, global, other thread, blocking stream"] = blocking
    report.fact(capture=answers)
    refused = {
        name: codes
        for name, codes in answers.items()
        if name.partition(",")[0] in own
        and name.endswith("relaxed thread")
        and (codes[0] not in (0, NOT_READY) or codes[1] != 0)
    }
    if refused:
        raise RuntimeError(f"a relaxed thread breaks a capture, (its call, the end): {refused}")


def page_calls(driver: Driver) -> tuple[Call, Callable[[], None]]:
    """Returns a call that creates, maps and removes a page, and one that removes the pages that
    failed calls left. Those would make calls of the next capture fail."""
    address = driver.reserve(PAGE_BYTES)
    left: list[int] = []

    def page() -> int:
        code, handle = driver.create_code(PAGE_BYTES)
        if code:
            return code
        for name, arguments in _page_calls(address, handle):
            code = code or driver.code(name, *arguments)
            if name == "cuMemMap" and code == 0:
                code = driver.allow_code(address, PAGE_BYTES)
        if code:
            left.append(handle)
        return code

    def tidy() -> None:
        while left:
            for name, arguments in _page_calls(address, left.pop())[1:]:
                driver.code(name, *arguments)

    return page, tidy


def _keeper_calls(driver: Driver) -> dict[str, Call]:
    """Returns the calls of the keeper's thread, each with one result code."""
    other, event = driver.stream(), driver.event()
    driver.record(event, other)
    return {
        "cuEventQuery": lambda: driver.query_code(event),
        "cuEventRecord": lambda: driver.code("cuEventRecord", *_pointers(event, other)),
        "cuMemAlloc": lambda: _allocate(driver),
    }


def _other_calls(driver: Driver) -> dict[str, Call]:
    """Returns the calls of torch and the adapter, which are recorded and not judged."""
    other, event = driver.stream(), driver.event()
    driver.record(event, other)
    memory = driver.allocate(PAGE_BYTES)
    byte = ctypes.create_string_buffer(1)
    one = ctypes.c_size_t(1)
    return {
        "cuStreamQuery": lambda: driver.code("cuStreamQuery", *_pointers(other)),
        "cuStreamSynchronize": lambda: driver.code("cuStreamSynchronize", *_pointers(other)),
        "cuStreamIsCapturing of the default stream": lambda: driver.code(
            "cuStreamIsCapturing", None, ctypes.byref(ctypes.c_int())
        ),
        "cuEventSynchronize": lambda: driver.code("cuEventSynchronize", *_pointers(event)),
        "cuCtxSynchronize": lambda: driver.code("cuCtxSynchronize"),
        "cuMemcpyDtoH": lambda: driver.code("cuMemcpyDtoH_v2", byte, u64(memory), one),
        "cuMemAllocHost": lambda: _allocate_host(driver),
    }


def _allocate_host(driver: Driver) -> int:
    memory = ctypes.c_void_p()
    code = driver.code("cuMemAllocHost_v2", ctypes.byref(memory), ctypes.c_size_t(PAGE_BYTES))
    return code or driver.code("cuMemFreeHost", memory)


def _page_calls(address: int, handle: int) -> list[tuple[str, tuple[object, ...]]]:
    size, zero = ctypes.c_size_t(PAGE_BYTES), ctypes.c_size_t(0)
    return [
        ("cuMemMap", (u64(address), size, zero, u64(handle), u64(0))),
        ("cuMemUnmap", (u64(address), size)),
        ("cuMemRelease", (u64(handle),)),
    ]


def _pointers(*values: int) -> Iterator[ctypes.c_void_p]:
    return (ctypes.c_void_p(value) for value in values)


def _allocate(driver: Driver) -> int:
    address = ctypes.c_uint64()
    code = driver.code("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(PAGE_BYTES))
    return code or driver.code("cuMemFree_v2", address)


def _captured(
    driver: Driver,
    mode: str,
    call: Call,
    where: Where,
    flags: int,
) -> list[int]:
    """Returns [result of the call, result of the end of the capture]."""
    stream = driver.stream(flags)
    driver.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), MODES[mode])
    code = where(driver, call)
    graph = ctypes.c_void_p()
    end = driver.code("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
    if end == 0 and graph.value:
        driver.call("cuGraphDestroy", graph)
    driver.call("cuStreamDestroy_v2", ctypes.c_void_p(stream))
    return [code, end]


def _here(_driver: Driver, call: Call) -> int:
    return call()


def _elsewhere(driver: Driver, call: Call) -> int:
    """Makes the call in another thread, with the same context."""
    answers: list[int] = []

    def run() -> None:
        driver.enter()
        answers.append(call())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answers[0] if answers else -1


def _elsewhere_relaxed(driver: Driver, call: Call) -> int:
    def relaxed() -> int:
        with _relaxed(driver):
            return call()

    return _elsewhere(driver, relaxed)


@contextmanager
def _relaxed(driver: Driver) -> Iterator[None]:
    mode = ctypes.c_int(MODES["relaxed"])
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    yield
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
