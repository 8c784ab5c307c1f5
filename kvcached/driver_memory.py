"""What the driver says of a device's memory, beside what its ledger says."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvcached.checks import checked, text
from kvcached.errors import (
    BackendUnavailableError,
    HiddenDeviceError,
    UnknownDeviceError,
    UnsupportedDeviceError,
)
from kvcached.usage import DeviceUsage, DriverMemory, GpuFacts, ProcessMemory


@dataclass(frozen=True)
class MemoryDrift:
    """The ledger's figure beside the driver's.

    A process is foreign if it is no client of the ledger. No process counts as foreign unless the
    driver shows all clients: in a container it may show a client under another number.
    """

    ledger_bytes: int
    """Pages that exist, and static memory, of all clients."""
    driver_bytes: int
    foreign: tuple[ProcessMemory, ...]
    excess_bytes: Mapping[int, int] = field(default_factory=dict)
    """By pid of the clients that the driver shows with a size: what they hold beyond their grants;
    negative: granted and not used."""
    names_processes: bool = False
    """Whether the driver shows processes, by the ledger's numbers."""

    @property
    def drift_bytes(self) -> int:
        """Used, and in no lease; below 0 where leased memory is not used yet."""
        return self.driver_bytes - self.ledger_bytes

    @property
    def foreign_bytes(self) -> int:
        """What the foreign processes hold, as far as it is known."""
        return sum(process.used_bytes or 0 for process in self.foreign)


def ask_driver(device: str) -> DriverMemory | None:
    """A GPU's memory by NVML; None where that is not to be had."""
    from kvcached import nvml  # imports ctypes, which most users of kvcached never need

    try:
        library = nvml.load()
        handle = library.find(device)
        total_bytes, free_bytes = library.memory(handle)
        return DriverMemory(total_bytes, free_bytes, "nvml", library.processes(handle))
    except (HiddenDeviceError, UnsupportedDeviceError):
        raise
    except BackendUnavailableError:
        return None


def ask_host(usage: DeviceUsage, resident_bytes: Iterable[int | None]) -> DriverMemory:
    """A host device's memory: what the OS says is behind its clients' pages."""
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

    `ledger_pids` maps the driver's number of a process to the ledger's, where a container makes
    them differ.
    """
    granted: Counter[int] = Counter()
    for client in usage.clients:
        granted[client.pid] += client.committed_bytes + client.static_bytes
    ours = ledger_pids or {}
    shown = {ours.get(process.pid, process.pid): process for process in memory.processes}
    if granted and not granted.keys() & shown.keys():
        shown = {}  # numbers of another pid namespace say nothing
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


def lack(device: str, memory: DriverMemory | None, usage: DeviceUsage) -> str | None:
    """Why the ledger's capacity is not there; None if it is, or the driver does not tell."""
    if memory is None:
        return None
    if memory.source == "host":
        return _lack_of_host(device, usage.capacity_bytes)
    outside_bytes = max(0, memory.used_bytes - clients_bytes(memory, usage))
    room_bytes = memory.total_bytes - outside_bytes
    if usage.capacity_bytes <= room_bytes:
        return None
    holders = describe(drift(memory, usage).foreign)
    return (
        f"device '{device}' has {mib(memory.total_bytes)}, of which {mib(outside_bytes)} are used "
        f"outside of the ledger ({holders or 'the driver does not say by whom'}): its capacity of "
        f"{mib(usage.capacity_bytes)} is not there. End those processes, or open the device with "
        f"at most {mib(room_bytes)}"
    )


def _lack_of_host(device: str, capacity_bytes: int) -> str | None:
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if capacity_bytes <= machine_bytes:
        return None
    return (
        f"device '{device}' has a capacity of {mib(capacity_bytes)}, and this machine "
        f"{mib(machine_bytes)} of memory; open the device with at most {mib(machine_bytes)}"
    )


def clients_bytes(memory: DriverMemory, usage: DeviceUsage) -> int:
    """What the ledger's clients hold, contexts included where the driver says so by process."""
    pids = {client.pid for client in usage.clients}
    by_driver = sum(p.used_bytes or 0 for p in memory.processes if p.pid in pids)
    return max(by_driver, usage.committed_bytes + usage.static_bytes)


def describe(processes: Iterable[ProcessMemory]) -> str:
    """ "pid 4711 (python) holds 512 MiB", for messages."""
    return ", ".join(
        f"pid {process.pid}"
        + (f" ({process.name})" if process.name else "")
        + (" holds " + mib(process.used_bytes) if process.used_bytes else "")
        for process in processes
    )


def mib(size_bytes: int) -> str:
    """Bytes for people."""
    return f"{size_bytes / (1 << 20):.0f} MiB"


@checked(device=text)
def gpu_facts(device: str) -> GpuFacts:
    """What "cuda:0" is, by NVML: no context is made. Raises NoDriverError, UnknownDeviceError,
    HiddenDeviceError, UnsupportedDeviceError."""
    from kvcached import nvml

    if not re.fullmatch("cuda:[0-9]{1,4}", device):  # _core's check would load libcuda
        raise UnknownDeviceError(f"device '{device}' is no GPU; name one such as 'cuda:0'")
    library = nvml.load()
    return library.facts(library.find(device))
