"""Output of `kvctl --json`: the figures of the tables, in bytes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvcached.monitoring.segments import Segment
from kvcached.monitoring.snapshot import DeviceSnapshot
from kvcached.tools.rates import Rates

Record = dict[str, Any]


def segment_record(segment: Segment) -> Record:
    """Returns a segment with its clients."""
    return {
        **asdict(segment),
        "path": str(segment.path),
        "clients_alive": segment.clients_alive,
        "clients_dead": segment.clients_dead,
    }


def device_record(snapshot: DeviceSnapshot, rates: Rates | None = None) -> Record:
    """Returns a device with its clients. `maps_per_s` is null before a client's second read."""
    clients = [
        {
            **asdict(client),
            "resident_bytes": resident_bytes,
            "maps_per_s": rates.maps_per_s(snapshot, client) if rates else None,
        }
        for client, resident_bytes in snapshot.clients
    ]
    return {
        "namespace": snapshot.namespace,
        "device": snapshot.device,
        **asdict(snapshot.usage),
        "clients": clients,
    }
