"""What all devices in shared memory hold at one moment, for tools and monitoring."""

from __future__ import annotations

from dataclasses import dataclass

from kvcached.checks import checked, text
from kvcached.errors import DeviceError, LedgerCorruptError, UnknownDeviceError
from kvcached.segments import Segment, segments
from kvcached.usage import ClientUsage, DeviceUsage


@dataclass(frozen=True)
class DeviceSnapshot:
    """One device: a coherent read of its ledger, and what the OS says of its clients' pages.

    `resident_bytes` goes with `usage.clients`, entry by entry; None where the OS does not tell.
    """

    namespace: str
    device: str
    usage: DeviceUsage
    resident_bytes: tuple[int | None, ...]

    @property
    def clients(self) -> tuple[tuple[ClientUsage, int | None], ...]:
        """Each client with its resident bytes."""
        return tuple(zip(self.usage.clients, self.resident_bytes, strict=True))


def used_segments(namespace: str | None = None, device: str | None = None) -> list[Segment]:
    """Segments that some process has open and that this library can read."""
    return [
        segment
        for segment in segments(namespace)
        if device in (None, segment.device)
        and segment.capacity_bytes is not None
        and segment.stale_reason is None
    ]


@dataclass(frozen=True)
class UnreadDevice:
    """Device in use whose ledger could not be read, since another process keeps it locked."""

    namespace: str
    device: str
    error: LedgerCorruptError


@checked(namespace=text, device=text)
def take_snapshots(namespace: str | None = None, device: str | None = None) -> list[DeviceSnapshot]:
    """Every device in use, or those of one namespace or name. One that goes meanwhile, or cannot be
    read, is left out.

    Dead clients are freed on the way, as by `Device.usage`.
    """
    return [read for read in read_devices(namespace, device) if isinstance(read, DeviceSnapshot)]


@checked(namespace=text, device=text)
def read_devices(
    namespace: str | None = None, device: str | None = None
) -> list[DeviceSnapshot | UnreadDevice]:
    """`take_snapshots`, with the devices that cannot be read."""
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
