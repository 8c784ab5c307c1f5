"""Part of the step "models": memory of processes by NVML, on which leases and the drift of free
memory depend."""

from __future__ import annotations

import os
import time
from statistics import median
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from lab.gpu_check.driver import Driver
from lab.gpu_check.kv import ledger
from lab.gpu_check.memory.peers import Peer
from lab.gpu_check.report import Skip
from lab.gpu_check.sizes import MIB, PAGE_BYTES, Sizes

if TYPE_CHECKING:
    from kvcached import Device

SLACK_BYTES = 32 * MIB
FREE_SLACK_BYTES = 256 * MIB  # as engine.memory_slack is by default
GONE_S = 20.0
ASKED = 30


def process_figures(driver: Driver, sizes: Sizes) -> dict[str, Any]:
    """Returns NVML's memory of this process as its pages change, and that of a killed process.

    NVML may name no processes at all (other pid namespaces). Prism then estimates, and the facts
    have None. Raises RuntimeError for a figure that does not follow the pages, and for free memory
    that differs from the driver's. Raises Skip where NVML is missing.
    """
    pages = sizes.pages(256)
    namespace = f"gpu-check-{uuid4().hex[:8]}"
    with ledger(4 * pages, namespace) as device:
        memory = device.driver_memory()
        if memory is None:
            raise Skip("NVML, which tells the memory of processes, is missing")
        free, total = driver.memory()
        off = {"free": memory.free_bytes - free, "total": memory.total_bytes - total}
        facts: dict[str, Any] = {"ask_ms": round(asking_s(device) * 1e3, 3), "off_bytes": off}
        if abs(off["free"]) > FREE_SLACK_BYTES:
            raise RuntimeError(f"NVML's free memory is not the driver's: {off}")
        with device.client("books", background=False) as client:
            tensor = client.alloc_virtual_tensor(pages * PAGE_BYTES)
            figures = [used_bytes(device, os.getpid())]
            tensor.map(0, pages * PAGE_BYTES)
            figures.append(used_bytes(device, os.getpid()))
            tensor.unmap(0, pages * PAGE_BYTES)
            figures.append(used_bytes(device, os.getpid()))
        facts |= {"pages_bytes": pages * PAGE_BYTES, "own_figures": figures}
        facts |= killed(device, namespace, pages)
    empty, full, again = figures
    if empty is not None and full is not None and again is not None:
        moved = full - empty - pages * PAGE_BYTES, again - empty
        if any(abs(bytes_) > SLACK_BYTES for bytes_ in moved):
            raise RuntimeError(f"a process's figure does not follow its pages: {facts}")
    return facts


def asking_s(device: Device) -> float:
    """Returns the median seconds of a query, which agents make in their event loop."""
    taken = []
    for _ in range(ASKED):
        began_s = time.perf_counter()
        device.driver_memory()
        taken.append(time.perf_counter() - began_s)
    return median(taken)


def used_bytes(device: Device, pid: int) -> int | None:
    """Returns the memory of a process by NVML, None if it does not name it or gives no size."""
    memory = device.driver_memory()
    found = [p.used_bytes for p in memory.processes if p.pid == pid] if memory else []
    return found[0] if found else None


def killed(device: Device, namespace: str, pages: int) -> dict[str, Any]:
    """Returns NVML's memory of a process with pages, and how long NVML names it after its death."""
    with Peer(namespace, str(pages), module="lab.gpu_check.memory.holder") as peer:
        peer.answer()
        pid = peer.process.pid
        held_bytes = used_bytes(device, pid)
        death = peer.kill_until(lambda: used_bytes(device, pid) is None, GONE_S)
    gone_ms = None if held_bytes is None else round(death.back_s * 1e3, 1)
    return {"peer_bytes": held_bytes, "gone_ms": gone_ms}
