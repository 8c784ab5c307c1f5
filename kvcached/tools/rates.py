"""Rates at which clients map and unmap, from two reads of their counters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcached.monitoring.snapshot import DeviceSnapshot
from kvcached.usage import ClientUsage

Key = tuple[str, str, str, int]


def _key(snapshot: DeviceSnapshot, client: ClientUsage) -> Key:
    return snapshot.namespace, snapshot.device, client.name, client.pid


def _count(snapshots: Iterable[DeviceSnapshot]) -> dict[Key, int]:
    counts: dict[Key, int] = {}
    for snapshot in snapshots:
        for client in snapshot.usage.clients:
            key = _key(snapshot, client)
            counts[key] = counts.get(key, 0) + client.maps + client.unmaps
    return counts


@dataclass
class Rates:
    """Rates between consecutive reads. Clients of one name and process count together."""

    _at_s: float | None = None
    _counts: dict[Key, int] = field(default_factory=dict)
    _rates: dict[Key, float] = field(default_factory=dict)

    def update(self, now_s: float, snapshots: Iterable[DeviceSnapshot]) -> None:
        """Adds the next read, at `now_s` of a monotonic clock."""
        counts = _count(snapshots)
        self._rates = {}
        if self._at_s is not None and now_s > self._at_s:
            for key in counts.keys() & self._counts.keys():
                moved = max(0, counts[key] - self._counts[key])
                self._rates[key] = moved / (now_s - self._at_s)
        self._at_s, self._counts = now_s, counts

    def maps_per_s(self, snapshot: DeviceSnapshot, client: ClientUsage) -> float | None:
        """Returns the runs of pages mapped or unmapped a second, None for a client seen once."""
        return self._rates.get(_key(snapshot, client))
