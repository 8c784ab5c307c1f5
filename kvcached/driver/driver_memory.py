"""A device's memory as the driver counts it, compared with its ledger."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcached.checks import checked, text
from kvcached.errors import (
    BackendUnavailableError,
    HiddenDeviceError,
    NoDriverError,
    UnknownDeviceError,
    UnsupportedDeviceError,
)
from kvcached.usage import DeviceUsage, DriverMemory, GpuFacts, ProcessMemory

if TYPE_CHECKING:
    from kvcached.driver.nvml import Nvml


@dataclass(frozen=True)
class MemoryDrift:
    """Difference between the ledger's figure and the driver's."""

    ledger_bytes: int
    """Existing pages and static memory of all clients."""
    driver_bytes: int
    """Used bytes as the driver counts them."""
    foreign: tuple[ProcessMemory, ...]
    """Processes that are not clients of the ledger.

    Empty unless the driver shows all clients, since in a container it may show a client under
    another pid.
    """
    excess_bytes: Mapping[int, int] = field(default_factory=dict)
    """Bytes that a client holds beyond its grants, by pid, where the driver shows a size.

    Negative: granted and not used.
    """
    names_processes: bool = False
    """True if the driver shows processes by the ledger's pids."""

    @property
    def drift_bytes(self) -> int:
        """Bytes used without a lease. Negative where leased memory is not used yet."""
        return self.driver_bytes - self.ledger_bytes

    @property
    def foreign_bytes(self) -> int:
        """Known bytes of the foreign processes."""
        return sum(process.used_bytes or 0 for process in self.foreign)


def gpu_memory(device: str) -> DriverMemory | None:
    """Returns a GPU's memory by NVML, or None if NVML is not available."""
    try:
        library = _nvml()
        handle = library.find(device)
        total_bytes, free_bytes = library.memory(handle)
        return DriverMemory(total_bytes, free_bytes, "nvml", library.processes(handle))
    except (HiddenDeviceError, UnsupportedDeviceError):
        raise
    except BackendUnavailableError:
        return None


def host_memory(usage: DeviceUsage, resident_bytes: Iterable[int | None]) -> DriverMemory:
    """Returns a host device's memory: the OS's count of its clients' pages."""
    sizes = list(zip(usage.clients, resident_bytes, strict=True))
    processes = tuple(ProcessMemory(client.pid, size, client.name) for client, size in sizes)
    used_bytes = sum(size or 0 for _, size in sizes)
    return DriverMemory(
        usage.capacity_bytes, max(0, usage.capacity_bytes - used_bytes), "host", processes
    )


def drift(
    memory: DriverMemory, usage: DeviceUsage, ledger_pids: Mapping[int, int] | None = None
) -> MemoryDrift:
    """Compares both figures of one moment.

    `ledger_pids` maps the driver's pid of a process to the ledger's, where a container makes them
    differ.
    """
    granted: Counter[int] = Counter()
    for client in usage.clients:
        granted[client.pid] += client.committed_bytes + client.static_bytes
    ours = ledger_pids or {}
    shown = {ours.get(process.pid, process.pid): process for process in memory.processes}
    if granted and not granted.keys() & shown.keys():
        shown = {}  # the driver's pids are of another pid namespace
    excess_bytes = {
        pid: process.used_bytes - granted[pid]
        for pid, process in shown.items()
        if pid in granted and process.used_bytes is not None
    }
    all_known = granted.keys() <= shown.keys()
    foreign = tuple(p for pid, p in shown.items() if all_known and pid not in granted)
    return MemoryDrift(
        granted.total(), memory.used_bytes, foreign, excess_bytes, names_processes=bool(shown)
    )


def capacity_shortfall(device: str, memory: DriverMemory | None, usage: DeviceUsage) -> str | None:
    """Returns a message if the ledger's capacity does not exist on the device.

    Returns None if it exists or the driver's figure is not available.
    """
    if memory is None:
        return None
    if memory.source == "host":
        return _host_shortfall(device, usage.capacity_bytes)
    outside_bytes = max(0, memory.used_bytes - clients_bytes(memory, usage))
    room_bytes = memory.total_bytes - outside_bytes
    if usage.capacity_bytes <= room_bytes:
        return None
    holders = describe(drift(memory, usage).foreign)
    return (
        f"device '{device}' has {mib(memory.total_bytes)}, of which {mib(outside_bytes)} are used "
        f"outside of the ledger ({holders or 'the driver does not show by which process'}), so its "
        f"capacity of {mib(usage.capacity_bytes)} is not available. End those processes, or open "
        f"the device with at most {mib(room_bytes)}"
    )


def _host_shortfall(device: str, capacity_bytes: int) -> str | None:
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if capacity_bytes <= machine_bytes:
        return None
    return (
        f"device '{device}' has a capacity of {mib(capacity_bytes)}, but this machine has only "
        f"{mib(machine_bytes)} of memory; open the device with at most {mib(machine_bytes)}"
    )


def clients_bytes(memory: DriverMemory, usage: DeviceUsage) -> int:
    """Returns what the ledger's clients hold, with contexts where the driver shows processes."""
    pids = {client.pid for client in usage.clients}
    by_driver = sum(p.used_bytes or 0 for p in memory.processes if p.pid in pids)
    return max(by_driver, usage.committed_bytes + usage.static_bytes)


def describe(processes: Iterable[ProcessMemory]) -> str:
    """Returns text such as "pid 4711 (python) holds 512 MiB", for messages."""
    return ", ".join(
        f"pid {process.pid}"
        + (f" ({process.name})" if process.name else "")
        + (" holds " + mib(process.used_bytes) if process.used_bytes else "")
        for process in processes
    )


def mib(size_bytes: int) -> str:
    """Returns a size in MiB, for messages."""
    return f"{size_bytes / (1 << 20):.0f} MiB"


@checked(device=text)
def gpu_facts(device: str) -> GpuFacts:
    """Returns the name, UUID, driver version, MIG state and memory of "cuda:0", by NVML.

    Makes no CUDA context. Raises NoDriverError, UnknownDeviceError, HiddenDeviceError,
    UnsupportedDeviceError.
    """
    if not re.fullmatch("cuda:[0-9]{1,4}", device):  # _core's check would load libcuda
        raise UnknownDeviceError(f"device '{device}' is not a GPU; name one such as 'cuda:0'")
    library = _nvml()
    return library.facts(library.find(device))


def _nvml() -> Nvml:
    # Imports ctypes, which most processes never need.
    try:
        from kvcached.driver import nvml
    except OSError as error:
        raise NoDriverError(f"NVML cannot be loaded: {error}") from error
    return nvml.load()
