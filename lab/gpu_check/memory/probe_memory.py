"""Part of the step "probe": contents and accounting of memory, also as other processes see it."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from pathlib import Path
from typing import Any

from lab.gpu_check.driver import NOT_INITIALIZED, OUT_OF_MEMORY, Driver, DriverError, skipped
from lab.gpu_check.memory.peers import PATTERN, Observer, Peer, fill_and_remove
from lab.gpu_check.report import stretched
from lab.gpu_check.sizes import GIB, MIB, PAGE_BYTES

GRANT_S = 10.0
GRANT_BYTES_PER_S = 4 * GIB
SETTLE_S = 1.0
SHARE_HELD = 0.6


def footprint() -> dict[str, int]:
    """Returns the bytes that a context takes, and then allocations and a first memset.

    Another process tells them, since this one cannot before it has a context.

    REQUIRES: this process has used no CUDA yet.
    """
    try:
        uninitialised = Driver().code("cuDeviceGetCount", _int())
    except OSError as error:
        raise skipped(error) from error
    if uninitialised != NOT_INITIALIZED:
        raise RuntimeError(f"cuDeviceGetCount answers {uninitialised} before cuInit, not 3")
    try:
        observer = Observer()
    except RuntimeError as error:
        raise skipped(error) from error
    with observer:
        before = observer.free_bytes()
        driver = Driver.open()
        with_context = observer.free_bytes()
        small = driver.allocate(1)
        with_byte = observer.free_bytes()
        address = driver.allocate(PAGE_BYTES)
        with_memory = observer.free_bytes()
        driver.fill(address, 1, PAGE_BYTES)
        with_memset = observer.free_bytes()
        own = driver.free_bytes()
        driver.free(address)
        driver.free(small)
        after = observer.free_bytes()
    return {
        "context_bytes": before - with_context,
        "allocation_of_1_byte_bytes": with_context - with_byte,
        "allocation_of_2MiB_bytes": with_byte - with_memory,
        "first_memset_bytes": with_memory - with_memset,
        "kept_after_free_bytes": with_context - after,
        "seen_inside_minus_outside_bytes": own - with_memset,
    }


def _int() -> Any:
    return ctypes.byref(ctypes.c_int())


def fresh_pages(driver: Driver, pages: int) -> dict[str, Any]:
    """Returns the contents of new pages, after pages of this process and of a dead one.

    CUDA promises nothing, and kvcached never expects zeros. No content is a fault.
    """
    fill_and_remove(driver, pages, PAGE_BYTES)
    own = _contents(driver, pages)
    with Peer("pattern", str(pages), str(PAGE_BYTES)) as peer:
        peer.answer()
        peer.process.wait(GRANT_S)
    return {"pages": pages, "after_own": own, "after_other_process": _contents(driver, pages)}


def _contents(driver: Driver, pages: int) -> dict[str, int]:
    """Returns how many new pages are zero, have the pattern, or have other contents."""
    address, handles = driver.map_pages(pages, PAGE_BYTES)
    found = {"zero": 0, "pattern": 0, "other": 0}
    for number in range(pages):
        content = driver.read(address + number * PAGE_BYTES, PAGE_BYTES)
        is_zero = content.count(0) == PAGE_BYTES
        is_pattern = content.count(PATTERN) == PAGE_BYTES
        found["zero" if is_zero else "pattern" if is_pattern else "other"] += 1
    driver.remove_pages(address, handles, PAGE_BYTES)
    return found


def books(driver: Driver, pages: int) -> dict[str, Any]:
    """Returns how the driver's free bytes change as pages are created, mapped and released."""
    free = [driver.free_bytes()]
    address, handles = driver.map_pages(pages, PAGE_BYTES)
    free.append(driver.free_bytes())
    driver.fill(address, 1, pages * PAGE_BYTES)
    free.append(driver.free_bytes())
    driver.remove_pages(address, handles, PAGE_BYTES)
    free.append(driver.free_bytes())
    facts = {
        "bytes": pages * PAGE_BYTES,
        "taken_bytes": free[0] - free[1],
        "memset_bytes": free[1] - free[2],
        "kept_bytes": free[0] - free[3],
    }
    if abs(facts["taken_bytes"] - facts["bytes"]) > 64 * MIB or facts["kept_bytes"] > 64 * MIB:
        raise RuntimeError(f"free memory does not follow what is held: {facts}")
    return facts


def killed_process(driver: Driver) -> dict[str, Any]:
    """Returns the time until the driver grants the memory of a killed process."""
    free_bytes = driver.free_bytes()
    piece_bytes = GIB if free_bytes > 16 * GIB else 8 * PAGE_BYTES
    pieces = int(free_bytes * SHARE_HELD) // piece_bytes
    held_bytes = pieces * piece_bytes
    with Peer("hold", str(held_bytes), str(piece_bytes)) as peer:
        peer.answer()
        if _grab(driver, pieces, piece_bytes):
            raise RuntimeError("two processes hold more than the GPU has: its memory is not shared")
        death = peer.kill_until(
            lambda: _grab(driver, pieces, piece_bytes), grant_limit_s(held_bytes)
        )
    return {"held_bytes": held_bytes, **death.facts()}


def grant_limit_s(held_bytes: int) -> float:
    """Returns how long to wait for the memory of a dead process: the driver clears it first."""
    return stretched(GRANT_S + held_bytes / GRANT_BYTES_PER_S)


def _grab(driver: Driver, pieces: int, piece_bytes: int) -> bool:
    """Returns whether so many pieces can be created at this moment. Releases them."""
    handles = []
    try:
        for _ in range(pieces):
            code, handle = driver.create_code(piece_bytes)
            if code == OUT_OF_MEMORY:
                return False
            if code:
                raise DriverError("cuMemCreate", code, driver.name_of(code))
            handles.append(handle)
        return True
    finally:
        for handle in handles:
            driver.release(handle)


def exported_memory(driver: Driver, folder: Path) -> dict[str, Any]:
    """Imports pages of another process, and returns free memory until both have released them.

    The pages count once, and stay until the last of both processes releases them. The other process
    is killed.
    """
    pages = 8
    path = folder / f"pages-{os.getpid()}"
    free = [driver.free_bytes()]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(GRANT_S)
        with Peer("share", str(path), str(pages), str(PAGE_BYTES)) as peer:
            connection, _ = listener.accept()
            with connection:
                _, files, _, _ = socket.recv_fds(connection, 16, pages)
            peer.answer()
            free.append(driver.free_bytes())
            handles = [driver.import_file(file) for file in files]
            for file in files:
                os.close(file)
            free.append(driver.free_bytes())
            peer.kill()
    path.unlink()
    time.sleep(SETTLE_S)
    free.append(driver.free_bytes())
    for handle in handles:
        driver.release(handle)
    time.sleep(SETTLE_S)
    free.append(driver.free_bytes())
    return {
        "pages_bytes": pages * PAGE_BYTES,
        "with_exporter_bytes": free[0] - free[1],
        "more_when_imported_bytes": free[1] - free[2],
        "after_exporter_s_death_bytes": free[0] - free[3],
        "after_release_bytes": free[0] - free[4],
    }


def forked_child(driver: Driver) -> dict[str, int]:
    """Returns the result codes in a child of a process that uses CUDA. kvcached expects 3."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        codes = (driver.code("cuInit", 0), driver.code("cuDeviceGetCount", _int()))
        os.write(writer, " ".join(map(str, codes)).encode())
        os._exit(0)
    os.close(writer)
    answer = os.read(reader, 100).decode()
    os.close(reader)
    os.waitpid(pid, 0)
    init, count = (int(code) for code in answer.split())
    if init != NOT_INITIALIZED:
        raise RuntimeError(f"cuInit answers {init} in a forked child, not 3")
    return {"cuInit": init, "cuDeviceGetCount": count}
