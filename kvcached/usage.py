"""Plain data: what clients, devices and processes hold."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcached._core import ClientRecord


@dataclass(frozen=True)
class ClientUsage:
    """One client's record in the ledger.

    `reserved_bytes` counts its pages, `committed_bytes` of which exist. `static_bytes` comes on
    top; minimum and limit govern pages alone. `maps` and `unmaps` count runs of pages.
    `spare_bytes` and `evictable_bytes` are what it could do without: pages without a live block,
    and those with prefix cache alone, as its engine says. Asked to shrink, it owes `asked_bytes`;
    over its life it gave `given_bytes`, of which `evicted_bytes` cost `evicted_tokens` of prefix
    cache. `number` is its own on the device: it tells clients of one name and process apart.
    """

    name: str
    pid: int
    reserved_bytes: int
    committed_bytes: int
    static_bytes: int
    min_bytes: int
    limit_bytes: int | None
    maps: int
    unmaps: int
    spare_bytes: int = 0
    evictable_bytes: int = 0
    asked_bytes: int = 0
    given_bytes: int = 0
    evicted_tokens: int = 0
    evicted_bytes: int = 0
    number: int = 0

    @property
    def evicted_bytes_per_token(self) -> float | None:
        """Memory that came free per token of prefix cache evicted on request; None before any."""
        return self.evicted_bytes / self.evicted_tokens if self.evicted_tokens else None

    @classmethod
    def of(cls, record: ClientRecord) -> ClientUsage:
        """Copies the extension's record."""
        return cls(*_of_record(record))


# A ClientUsage's values by position. The record calls its number `joined`.
_of_record = attrgetter(*(field.name for field in fields(ClientUsage)[:-1]), "joined")


@dataclass(frozen=True)
class DeviceUsage:
    """One coherent read of a device's ledger.

    `reserved_bytes` is what its clients take from the device together: static memory plus, for
    each, the larger of its pages and its minimum. It and `free_bytes` add up to the capacity.
    """

    capacity_bytes: int
    page_bytes: int
    reserved_bytes: int
    committed_bytes: int
    static_bytes: int
    free_bytes: int
    clients: tuple[ClientUsage, ...]


@dataclass(frozen=True)
class ProcessMemory:
    """A process with memory on a GPU. `used_bytes` is None where the driver does not say."""

    pid: int
    used_bytes: int | None
    name: str


@dataclass(frozen=True)
class GpuFacts:
    """What a GPU is. `mig` says whether it is cut into instances."""

    name: str
    uuid: str
    driver_version: str
    mig: bool


@dataclass(frozen=True)
class DriverMemory:
    """A device's memory as the driver counts it, or, for a host device, the OS.

    `source` is "nvml" or "host". `processes` are those that the driver shows with memory there.
    """

    total_bytes: int
    free_bytes: int
    source: str
    processes: tuple[ProcessMemory, ...]

    @property
    def used_bytes(self) -> int:
        """Memory of all processes: contexts, graphs and everything else."""
        return self.total_bytes - self.free_bytes


@dataclass(frozen=True)
class KVCounters:
    """Calls that changed mappings (one per run of pages and buffer) and the pages they moved.

    `failed_looks` counts how often the client's background thread could not read the ledger, for
    example because another process kept it locked. The thread tries again, each time later.
    """

    maps: int
    unmaps: int
    pages_mapped: int
    pages_unmapped: int
    failed_looks: int = 0


@dataclass(frozen=True)
class Fragmentation:
    """What a KV cache has mapped, and the fewest slabs that could hold its live blocks.

    The difference is free blocks in slabs that are in use, and slabs kept ahead of need.
    """

    mapped_bytes: int
    needed_bytes: int

    @property
    def ratio(self) -> float:
        """mapped / needed: 1 at best, and when nothing is mapped; inf when nothing is needed."""
        if self.needed_bytes == 0:
            return math.inf if self.mapped_bytes else 1.0
        return self.mapped_bytes / self.needed_bytes
