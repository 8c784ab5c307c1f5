"""Plain data: memory of clients, devices and processes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcached._core import ClientRecord


@dataclass(frozen=True)
class ClientUsage:
    """One client's record in the ledger. `min_bytes` and `limit_bytes` apply to pages alone."""

    name: str
    pid: int
    reserved_bytes: int
    """Bytes of the client's pages."""
    committed_bytes: int
    """Part of `reserved_bytes` whose pages exist."""
    static_bytes: int
    """Leased bytes in addition to the pages."""
    min_bytes: int
    limit_bytes: int | None
    maps: int
    """Runs of pages that were mapped."""
    unmaps: int
    """Runs of pages that were unmapped."""
    spare_bytes: int = 0
    """Bytes of pages without a live block."""
    evictable_bytes: int = 0
    """Bytes of pages that hold prefix cache alone, as the engine publishes them."""
    asked_bytes: int = 0
    """Bytes of its unanswered shrink request."""
    given_bytes: int = 0
    """Bytes given back on request over its life."""
    evicted_tokens: int = 0
    """Prefix-cache tokens evicted on request."""
    evicted_bytes: int = 0
    """Part of `given_bytes` that those tokens freed."""
    number: int = 0
    """Unique on the device; tells clients of one name and process apart."""

    @property
    def evicted_bytes_per_token(self) -> float | None:
        """Bytes freed per token of prefix cache evicted on request, None before any."""
        return self.evicted_bytes / self.evicted_tokens if self.evicted_tokens else None

    @classmethod
    def of(cls, record: ClientRecord) -> ClientUsage:
        """Copies the extension's record."""
        return cls(*_of_record(record))


# Values of a ClientUsage by position. The record's name for `number` is `joined`.
_of_record = attrgetter(*(field.name for field in fields(ClientUsage)[:-1]), "joined")


@dataclass(frozen=True)
class DeviceUsage:
    """One coherent read of a device's ledger."""

    capacity_bytes: int
    page_bytes: int
    reserved_bytes: int
    """Bytes that the clients take together. With `free_bytes` they make up the capacity.

    Static memory plus, for each client, the larger of its pages and its minimum.
    """
    committed_bytes: int
    static_bytes: int
    free_bytes: int
    clients: tuple[ClientUsage, ...]


@dataclass(frozen=True)
class ProcessMemory:
    """A process with memory on a GPU. `used_bytes` is None where the driver does not show it."""

    pid: int
    used_bytes: int | None
    name: str


@dataclass(frozen=True)
class GpuFacts:
    """Properties of a GPU. `mig` is True if it is split into MIG instances. A total of 0 bytes is
    not known."""

    name: str
    uuid: str
    driver_version: str
    mig: bool
    total_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True)
class DriverMemory:
    """A device's memory as the driver counts it or, for a host device, the OS.

    `source` is "nvml" or "host". `processes` are those shown with memory on the device.
    """

    total_bytes: int
    free_bytes: int
    source: str
    processes: tuple[ProcessMemory, ...]

    @property
    def used_bytes(self) -> int:
        """Memory of all processes, with contexts and graphs."""
        return self.total_bytes - self.free_bytes


@dataclass(frozen=True)
class KVCounters:
    """Calls that changed mappings (one per run of pages and buffer), and the pages they moved."""

    maps: int
    unmaps: int
    pages_mapped: int
    pages_unmapped: int
    failed_looks: int = 0
    """Number of times the client's background thread could not read the ledger.

    For example because another process kept it locked. The thread retries with growing delays.
    """


@dataclass(frozen=True)
class Fragmentation:
    """Bytes that a KV cache has mapped, and the fewest slabs that could hold its live blocks.

    The difference is free blocks in slabs that are in use, and slabs mapped ahead of need.
    """

    mapped_bytes: int
    needed_bytes: int

    @property
    def ratio(self) -> float:
        """mapped / needed: 1 at best and when nothing is mapped, inf when nothing is needed."""
        if self.needed_bytes == 0:
            return math.inf if self.mapped_bytes else 1.0
        return self.mapped_bytes / self.needed_bytes
