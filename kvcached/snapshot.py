"""What all devices in shared memory hold at one moment, for tools and monitoring."""

from __future__ import annotations

from dataclasses import dataclass

from kvcached.checks import checked, text
from kvcached.errors import DeviceError, UnknownDeviceError
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


@checked(namespace=text, device=text)
def take_snapshots(namespace: str | None = None, device: str | None = None) -> list[DeviceSnapshot]:
    """Every device in use, or those of one namespace or name. One that goes meanwhile is left out.

    Dead clients are freed on the way, as by `Device.usage`.
    """
    taken = (_snapshot(segment) for segment in used_segments(namespace, device))
    return [snapshot for snapshot in taken if snapshot]


def _snapshot(segment: Segment) -> DeviceSnapshot | None:
    try:
        usage, resident_bytes = segment.open().residency()
    except (UnknownDeviceError, DeviceError):
        return None
    return DeviceSnapshot(segment.namespace, segment.device, usage, resident_bytes)
