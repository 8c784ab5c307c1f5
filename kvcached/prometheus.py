"""Prometheus metrics of every device and client, from any process of the machine.

`exposition()` returns the text format for a custom HTTP handler and needs no other package.
`Collector` is for a registry of the package prometheus-client:

    prometheus_client.REGISTRY.register(kvcached.prometheus.Collector())
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.monitoring.snapshot import DeviceSnapshot, take_snapshots

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Labels = tuple[str, ...]

DEVICE_LABELS = ("namespace", "device")
CLIENT_LABELS = (*DEVICE_LABELS, "client", "pid")


@dataclass(frozen=True)
class Family:
    """One metric. `kind` is gauge or counter; each sample has a value for each label."""

    name: str
    kind: str
    help: str
    labels: Labels
    samples: dict[Labels, float]


# By field of DeviceUsage. The value of `clients` is their number.
_DEVICE = {
    "capacity_bytes": "Bytes of the device",
    "reserved_bytes": "Bytes charged to clients: static memory, pages, minimums",
    "committed_bytes": "Bytes of pages that exist",
    "static_bytes": "Bytes leased as static memory",
    "free_bytes": "Bytes not charged to any client",
    "clients": "Live clients",
}

# By field of ClientUsage, and `resident_bytes`, which the OS counts.
_CLIENT = {
    "reserved_bytes": ("gauge", "Bytes of pages reserved"),
    "committed_bytes": ("gauge", "Bytes of pages that exist"),
    "static_bytes": ("gauge", "Bytes leased as static memory"),
    "min_bytes": ("gauge", "Bytes of pages guaranteed"),
    "limit_bytes": ("gauge", "Limit of its pages; absent: unlimited"),
    "resident_bytes": ("gauge", "Physical memory of its pages; absent: unknown"),
    "spare_bytes": ("gauge", "Bytes of pages without a live block"),
    "evictable_bytes": ("gauge", "Bytes of pages with prefix cache alone, as its engine reports"),
    "asked_bytes": ("gauge", "Bytes it is asked to give back"),
    "given_bytes": ("counter", "Bytes given back on request"),
    "evicted_bytes": ("counter", "Part of given_bytes that evicted prefix cache freed"),
    "evicted_tokens": ("counter", "Tokens of prefix cache evicted on request"),
    "maps": ("counter", "Runs of pages mapped"),
    "unmaps": ("counter", "Runs of pages unmapped"),
}


def families(namespace: str | None = None, device: str | None = None) -> list[Family]:
    """Returns all metrics of all devices in use, or of one namespace or device.

    Clients of one process with the same name are added up. A counter's name has no `_total`.
    """
    snapshots = take_snapshots(namespace, device)
    return [*_device_families(snapshots), *_client_families(snapshots)]


def exposition(namespace: str | None = None, device: str | None = None) -> str:
    """Returns `families` in the text format (version 0.0.4)."""
    found = families(namespace, device)
    return "".join(f"{line}\n" for family in found for line in _lines(family))


class Collector:
    """Collector for prometheus-client's registries; reads the ledgers at each scrape."""

    def __init__(self, namespace: str | None = None, device: str | None = None) -> None:
        self.namespace = namespace
        self.device = device

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics; called by the registry.

        Raises ImportError without the package prometheus-client.
        """
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        for family in families(self.namespace, self.device):
            metric = kinds[family.kind](family.name, family.help, labels=family.labels)
            for values, value in family.samples.items():
                metric.add_metric(values, value)
            yield metric


def _device_families(snapshots: list[DeviceSnapshot]) -> Iterator[Family]:
    for name, help_text in _DEVICE.items():
        samples: dict[Labels, float] = {}
        for snapshot in snapshots:
            figure = getattr(snapshot.usage, name)
            samples[snapshot.namespace, snapshot.device] = (
                len(figure) if name == "clients" else figure
            )
        yield Family(f"kvcached_device_{name}", "gauge", help_text, DEVICE_LABELS, samples)


def _client_families(snapshots: list[DeviceSnapshot]) -> Iterator[Family]:
    for name, (kind, help_text) in _CLIENT.items():
        samples: dict[Labels, float] = {}
        for snapshot in snapshots:
            for client, resident_bytes in snapshot.clients:
                labels = (snapshot.namespace, snapshot.device, client.name, str(client.pid))
                is_resident = name == "resident_bytes"
                figure = resident_bytes if is_resident else getattr(client, name)
                if figure is not None:
                    samples[labels] = samples.get(labels, 0.0) + figure
        yield Family(f"kvcached_client_{name}", kind, help_text, CLIENT_LABELS, samples)


def _lines(family: Family) -> Iterator[str]:
    name = family.name + ("_total" if family.kind == "counter" else "")
    yield f"# HELP {name} {family.help}"
    yield f"# TYPE {name} {family.kind}"
    for values, value in family.samples.items():
        pairs = zip(family.labels, values, strict=True)
        labels = ",".join(f'{label}="{_escaped(text)}"' for label, text in pairs)
        yield f"{name}{{{labels}}} {int(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
