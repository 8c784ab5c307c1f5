"""Step "probe": what the driver grants and refuses, what each call costs, what a fresh page holds.

It uses ctypes alone, and needs neither kvcached nor torch. Times are microseconds of wall-clock
time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from ctypes import byref, c_size_t, c_void_p
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from lab.gpu_check.driver import (
    NOT_READY,
    POSIX_FILE,
    POSIX_FILES_SUPPORTED,
    READ,
    READ_WRITE,
    Driver,
    open_or_skip,
)
from lab.gpu_check.memory import probe_capture, probe_memory
from lab.gpu_check.report import Report, Skip, run_as_step
from lab.gpu_check.sizes import MIB, PAGE_BYTES, Sizes

MANY_MAPPINGS = 64
ADDRESSES_OF_ONE_HANDLE = 1000
BUSY_BYTES = 1 << 30
BUSY_FILLS = 400
WARM_UP = 8


def main(arguments: list[str] | None = None) -> int:
    return run_as_step("probe", __doc__, body, arguments)


def body(report: Report) -> None:
    with report.check("context_and_memset"):
        report.fact(footprint=probe_memory.footprint())
    driver = open_or_skip()
    sizes = Sizes.of(driver.free_bytes())
    if PAGE_BYTES % driver.granularity():
        raise RuntimeError(f"pages of {PAGE_BYTES} are not a multiple of {driver.granularity()}")
    with report.check("read_only_access"):
        report.fact(read_only=read_only_access(driver))
    with report.check("pinned_memory"):
        report.fact(pinned_us=pinned_memory(driver))
    with report.check("unmap_many"):
        report.fact(unmap_many=unmap_many(driver))
    with report.check("one_handle_many_addresses"):
        report.fact(one_handle=one_handle(driver))
    with report.check("call_times"):
        calls = call_times(driver, sizes.pages(512))
        report.fact(call_us=calls, cuda_malloc_us=cuda_malloc(driver, sizes.pages(128)))
        page_figures(report, calls)
        if driver.attribute(POSIX_FILES_SUPPORTED):
            report.fact(call_us_exportable=call_times(driver, sizes.pages(512), POSIX_FILE))
        report.fact(larger_us=larger_handles(driver, sizes))
    with report.check("calls_under_load"):
        loaded = under_load(driver, sizes)
        report.fact(under_load=loaded)
        grown = ("create", "map", "set_access")
        idle_us = sum(report.facts["call_us"][name]["median"] for name in grown)
        report.figure("page_under_load", sum(loaded[name]["us"] for name in grown), idle_us)
    with report.check("fresh_pages"):
        report.fact(fresh_pages=probe_memory.fresh_pages(driver, sizes.pages(64)))
    with report.check("books"):
        report.fact(books=probe_memory.books(driver, sizes.pages(64)))
    with report.check("capture"):
        probe_capture.check(driver, report)
    with report.check("exported_memory"):
        if not driver.attribute(POSIX_FILES_SUPPORTED):
            raise Skip("this GPU's memory cannot be shared between processes")
        with TemporaryDirectory() as folder:
            report.fact(exported=probe_memory.exported_memory(driver, Path(folder)))
    with report.check("killed_process"):
        killed = probe_memory.killed_process(driver)
        report.fact(killed=killed)
        report.figure("killed_process", killed["granted_ms_after_death"])
    with report.check("forked_child"):
        report.fact(forked=probe_memory.forked_child(driver))


def read_only_access(driver: Driver) -> dict[str, Any]:
    """Maps a page for reading alone, as guarded holes do, and says whether the driver grants it."""
    address = driver.reserve(PAGE_BYTES)
    handle = driver.create(PAGE_BYTES)
    driver.map(address, PAGE_BYTES, handle)
    code = driver.allow_code(address, PAGE_BYTES, READ)
    facts: dict[str, Any] = {"granted": code == 0, "code": code}
    if code == 0:
        facts["access"] = driver.access(address)
        facts["readable"] = len(driver.read(address, 16)) == 16
    driver.unmap(address, PAGE_BYTES)
    driver.release(handle)
    driver.free_address(address, PAGE_BYTES)
    return facts


def pinned_memory(driver: Driver) -> dict[str, float]:
    """Returns the microseconds to pin a weight link's buffers. A container may forbid that."""
    taken = {}
    for mebibytes in (16, 32):
        memory, size = c_void_p(), c_size_t(mebibytes * MIB)
        us, _ = timed(driver.call, "cuMemAllocHost_v2", byref(memory), size)
        taken[f"{mebibytes}MiB"] = us
        driver.call("cuMemFreeHost", memory)
    return taken


def unmap_many(driver: Driver) -> dict[str, Any]:
    """Allows access to 64 mappings of 64 handles by one call, and unmaps them by one call."""
    size_bytes = MANY_MAPPINGS * PAGE_BYTES
    address = driver.reserve(size_bytes)
    handles = [driver.create(PAGE_BYTES) for _ in range(MANY_MAPPINGS)]
    for number, handle in enumerate(handles):
        driver.map(address + number * PAGE_BYTES, PAGE_BYTES, handle)
    access_us, _ = timed(driver.allow, address, size_bytes, READ_WRITE)
    driver.fill(address, 7, size_bytes)
    last = driver.read(address + size_bytes - 1, 1)
    unmap_us, _ = timed(driver.unmap, address, size_bytes)
    for handle in handles:
        driver.release(handle)
    driver.free_address(address, size_bytes)
    if last != b"\x07":
        raise RuntimeError("a memset over all mappings did not write the last one")
    return {"mappings": MANY_MAPPINGS, "set_access_us": access_us, "unmap_us": unmap_us}


def one_handle(driver: Driver) -> dict[str, Any]:
    """Maps one allocation at 1,000 addresses, as a guard page is. All must show the same bytes."""
    size_bytes = ADDRESSES_OF_ONE_HANDLE * PAGE_BYTES
    address = driver.reserve(size_bytes)
    handle = driver.create(PAGE_BYTES)
    places = [address + n * PAGE_BYTES for n in range(ADDRESSES_OF_ONE_HANDLE)]
    free_bytes = driver.free_bytes()
    map_us = [timed(driver.map, at, PAGE_BYTES, handle)[0] for at in places]
    access_us = [timed(driver.allow, at, PAGE_BYTES)[0] for at in places]
    driver.fill(places[0], 0x3C, PAGE_BYTES)
    strays = [at for at in places[:: ADDRESSES_OF_ONE_HANDLE // 50] if driver.read(at, 1) != b"<"]
    taken_bytes = free_bytes - driver.free_bytes()
    unmap_us = [timed(driver.unmap, at, PAGE_BYTES)[0] for at in places]
    driver.release(handle)
    driver.free_address(address, size_bytes)
    if strays:
        raise RuntimeError(f"{len(strays)} addresses show other bytes than the first one")
    return {
        "addresses": ADDRESSES_OF_ONE_HANDLE,
        "map_us": spread(map_us),
        "set_access_us": spread(access_us),
        "unmap_us": spread(unmap_us),
        "driver_bytes": taken_bytes,
    }


def call_times(driver: Driver, pages: int, handle_types: int = 0) -> dict[str, Any]:
    """Times each call on single pages, as a model that grows page by page makes them."""
    size_bytes = pages * PAGE_BYTES
    address = driver.reserve(size_bytes)
    places = [address + n * PAGE_BYTES for n in range(pages)]
    made = [timed(driver.create, PAGE_BYTES, handle_types) for _ in places]
    handles = [handle for _, handle in made]
    pairs = list(zip(places, handles, strict=True))
    taken: dict[str, list[float]] = {"create": [us for us, _ in made]}
    taken["map"] = [timed(driver.map, a, PAGE_BYTES, h)[0] for a, h in pairs]
    taken["set_access"] = [timed(driver.allow, a, PAGE_BYTES)[0] for a in places]
    taken["unmap"] = [timed(driver.unmap, a, PAGE_BYTES)[0] for a in places]
    taken["release"] = [timed(driver.release, h)[0] for h in handles]
    driver.free_address(address, size_bytes)
    return {"pages": pages} | {name: spread(us[WARM_UP:] or us) for name, us in taken.items()}


def cuda_malloc(driver: Driver, pages: int) -> dict[str, float]:
    """Times cuMemAlloc and cuMemFree of a page's size, the calls of a static pool."""
    made = [timed(driver.allocate, PAGE_BYTES) for _ in range(pages)]
    freed = [timed(driver.free, address)[0] for _, address in made]
    return spread([us + back_us for (us, _), back_us in zip(made, freed, strict=True)])


def page_figures(report: Report, calls: dict[str, Any]) -> None:
    malloc_us = report.facts["cuda_malloc_us"]["median"]
    us = {name: found["median"] for name, found in calls.items() if name != "pages"}
    report.figure("page_create", us["create"], malloc_us)
    report.figure("page_step", us["map"] + us["set_access"], malloc_us)
    report.figure("page_return", us["unmap"] + us["release"], malloc_us)


def larger_handles(driver: Driver, sizes: Sizes) -> dict[str, Any]:
    """Times each call on larger allocations, for a store of weights or a large quantum."""
    facts: dict[str, Any] = {}
    for mebibytes in (64, 128):
        size_bytes = mebibytes * MIB
        if 4 * size_bytes > sizes.free_bytes:
            continue
        address = driver.reserve(size_bytes)
        create_us, handle = timed(driver.create, size_bytes)
        facts[f"{mebibytes}MiB"] = {
            "create": create_us,
            "map": timed(driver.map, address, size_bytes, handle)[0],
            "set_access": timed(driver.allow, address, size_bytes)[0],
            "unmap": timed(driver.unmap, address, size_bytes)[0],
            "release": timed(driver.release, handle)[0],
        }
        driver.free_address(address, size_bytes)
    return facts


def under_load(driver: Driver, sizes: Sizes) -> dict[str, Any]:
    """Times the calls while kernels run, to see whether they wait for the GPU."""
    busy_bytes = min(BUSY_BYTES, sizes.free_bytes // 4)
    buffer, stream, event = driver.allocate(busy_bytes), driver.stream(), driver.event()
    for value in range(BUSY_FILLS):
        driver.fill_behind(stream, buffer, value % 256, busy_bytes)
    driver.record(event, stream)
    address = driver.reserve(PAGE_BYTES)
    facts: dict[str, Any] = {}

    def note(name: str, call: Callable[[], Any]) -> Any:
        us, value = timed(call)
        facts[name] = {"us": us, "work_runs_on": driver.query_code(event) == NOT_READY}
        return value

    note("nothing", lambda: None)
    handle = note("create", lambda: driver.create(PAGE_BYTES))
    note("map", lambda: driver.map(address, PAGE_BYTES, handle))
    note("set_access", lambda: driver.allow(address, PAGE_BYTES))
    note("unmap", lambda: driver.unmap(address, PAGE_BYTES))
    note("release", lambda: driver.release(handle))
    facts["rest_us"] = timed(driver.synchronise, stream)[0]
    driver.free_address(address, PAGE_BYTES)
    driver.free(buffer)
    return facts


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Returns (microseconds, the result of the call)."""
    began = time.perf_counter()
    value = call(*arguments)
    return round((time.perf_counter() - began) * 1e6, 2), value


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(median(ordered), 2),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 2),
        "max": round(ordered[-1], 2),
    }


if __name__ == "__main__":
    sys.exit(main())
