"""State of all devices in shared memory at one moment, for tools and monitoring."""

from __future__ import annotations

from dataclasses import dataclass

from kvcached.checks import checked, text
from kvcached.errors import DeviceError, LedgerCorruptError, UnknownDeviceError
from kvcached.monitoring.segments import Segment, segments
from kvcached.usage import ClientUsage, DeviceUsage


@dataclass(frozen=True)
class DeviceSnapshot:
    """One device: a coherent read of its ledger, and the OS's count of its clients' pages."""

    namespace: str
    device: str
    usage: DeviceUsage
    resident_bytes: tuple[int | None, ...]
    """Bytes of each of `usage.clients`, None where the OS does not show them."""

    @property
    def clients(self) -> tuple[tuple[ClientUsage, int | None], ...]:
        """Pairs of each client and its resident bytes."""
        return tuple(zip(self.usage.clients, self.resident_bytes, strict=True))


def used_segments(namespace: str | None = None, device: str | None = None) -> list[Segment]:
    """Returns the segments that a process has open and that this library can read."""
    return [
        segment
        for segment in segments(namespace)
        if device in (None, segment.device)
        and segment.capacity_bytes is not None
        and segment.stale_reason is None
    ]


@dataclass(frozen=True)
class UnreadDevice:
    """Device in use whose ledger cannot be read because another process keeps it locked."""

    namespace: str
    device: str
    error: LedgerCorruptError


@checked(namespace=text, device=text)
def take_snapshots(namespace: str | None = None, device: str | None = None) -> list[DeviceSnapshot]:
    """Returns a snapshot of every device in use, or of those of one namespace or name.

    Leaves out devices that disappear meanwhile or cannot be read. Frees dead clients, as
    `Device.usage` does.
    """
    return [read for read in read_devices(namespace, device) if isinstance(read, DeviceSnapshot)]


@checked(namespace=text, device=text)
def read_devices(
    namespace: str | None = None, device: str | None = None
) -> list[DeviceSnapshot | UnreadDevice]:
    """Returns `take_snapshots` and an UnreadDevice for each device that cannot be read."""
    read = (_read(segment) for segment in used_segments(namespace, device))
    return [each for each in read if each]


def _read(segment: Segment) -> DeviceSnapshot | UnreadDevice | None:
    try:
        usage, resident_bytes = segment.open().residency()
    except LedgerCorruptError as error:
        return UnreadDevice(segment.namespace, segment.device, error)
    except (UnknownDeviceError, DeviceError):
        return None
    return DeviceSnapshot(segment.namespace, segment.device, usage, resident_bytes)
