"""Figures of every device and client for Prometheus, from any process of the machine.

`exposition()` is the text format, for a handler of one's own; it needs no other package.
`Collector` is for a registry of the package prometheus-client:

    prometheus_client.REGISTRY.register(kvcached.prometheus.Collector())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.snapshot import DeviceSnapshot, take_snapshots
from kvcached.usage import ClientUsage, DeviceUsage

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Labels = tuple[str, ...]

DEVICE_LABELS = ("namespace", "device")
CLIENT_LABELS = (*DEVICE_LABELS, "client", "pid")


@dataclass(frozen=True)
class Family:
    """One metric: `kind` is gauge or counter; samples have a value for each label."""

    name: str
    kind: str
    help: str
    labels: Labels
    samples: dict[Labels, float]


_DEVICE: dict[str, tuple[str, Callable[[DeviceUsage], float]]] = {
    "capacity_bytes": ("Bytes of the device", lambda usage: usage.capacity_bytes),
    "reserved_bytes": (
        "Bytes that clients take: static, pages, minimums",
        lambda u: u.reserved_bytes,
    ),
    "committed_bytes": ("Bytes of pages that exist", lambda usage: usage.committed_bytes),
    "static_bytes": ("Bytes that do not come and go", lambda usage: usage.static_bytes),
    "free_bytes": ("Bytes that nobody takes", lambda usage: usage.free_bytes),
    "clients": ("Live clients", lambda usage: len(usage.clients)),
}

_Client = Callable[[ClientUsage, int | None], float | None]
_CLIENT: dict[str, tuple[str, str, _Client]] = {
    "reserved_bytes": ("gauge", "Bytes of pages reserved", lambda c, _: c.reserved_bytes),
    "committed_bytes": ("gauge", "Bytes of pages that exist", lambda c, _: c.committed_bytes),
    "static_bytes": ("gauge", "Bytes that do not come and go", lambda c, _: c.static_bytes),
    "min_bytes": ("gauge", "Bytes of pages guaranteed", lambda c, _: c.min_bytes),
    "limit_bytes": ("gauge", "Bound of its pages; absent: none", lambda c, _: c.limit_bytes),
    "resident_bytes": ("gauge", "Memory behind its pages; absent: not told", lambda _, b: b),
    "spare_bytes": ("gauge", "Bytes of pages without a live block", lambda c, _: c.spare_bytes),
    "evictable_bytes": (
        "gauge",
        "Bytes of pages with prefix cache alone, as its engine says",
        lambda c, _: c.evictable_bytes,
    ),
    "asked_bytes": ("gauge", "Bytes it is asked to give back", lambda c, _: c.asked_bytes),
    "given_bytes": ("counter", "Bytes given back on request", lambda c, _: c.given_bytes),
    "evicted_bytes": (
        "counter",
        "Bytes of those that evicting prefix cache made free",
        lambda c, _: c.evicted_bytes,
    ),
    "evicted_tokens": (
        "counter",
        "Tokens of prefix cache evicted on request",
        lambda c, _: c.evicted_tokens,
    ),
    "maps": ("counter", "Runs of pages mapped", lambda c, _: c.maps),
    "unmaps": ("counter", "Runs of pages unmapped", lambda c, _: c.unmaps),
}


def families(namespace: str | None = None, device: str | None = None) -> list[Family]:
    """All metrics of all devices in use, or of one namespace or device.

    Clients of one process with the same name are added up. A counter's name has no `_total`.
    """
    snapshots = take_snapshots(namespace, device)
    return [*_device_families(snapshots), *_client_families(snapshots)]


def exposition(namespace: str | None = None, device: str | None = None) -> str:
    """`families` in the text format (version 0.0.4)."""
    found = families(namespace, device)
    return "".join(f"{line}\n" for family in found for line in _lines(family))


class Collector:
    """What prometheus-client's registries take: reads the ledgers at each scrape."""

    def __init__(self, namespace: str | None = None, device: str | None = None) -> None:
        self.namespace = namespace
        self.device = device

    def collect(self) -> Iterator[Metric]:
        """Called by the registry. ImportError without the package prometheus-client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        for family in families(self.namespace, self.device):
            metric = kinds[family.kind](family.name, family.help, labels=family.labels)
            for values, value in family.samples.items():
                metric.add_metric(values, value)
            yield metric


def _device_families(snapshots: list[DeviceSnapshot]) -> Iterator[Family]:
    for name, (help_text, value) in _DEVICE.items():
        samples: dict[Labels, float] = {(s.namespace, s.device): value(s.usage) for s in snapshots}
        yield Family(f"kvcached_device_{name}", "gauge", help_text, DEVICE_LABELS, samples)


def _client_families(snapshots: list[DeviceSnapshot]) -> Iterator[Family]:
    for name, (kind, help_text, value) in _CLIENT.items():
        samples: dict[Labels, float] = {}
        for snapshot in snapshots:
            for client, resident_bytes in snapshot.clients:
                labels = (snapshot.namespace, snapshot.device, client.name, str(client.pid))
                figure = value(client, resident_bytes)
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
