"""Exposition, read back by prometheus-client's own parser and registry."""

from __future__ import annotations

import os
import subprocess
import sys

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvcached import Device, prometheus

from .conftest import CAPACITY, PAGE

Samples = dict[tuple[str, str], float]


def parse(text: str) -> Samples:
    """Returns values by (metric, client), with "" for metrics of the device."""
    return {
        (sample.name, sample.labels.get("client", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_text_says_what_the_ledger_says(device: Device, namespace: str) -> None:
    with device.client("engine", min_bytes=4 * PAGE, limit_bytes=9 * PAGE) as client:
        tensor = client.alloc_virtual_tensor(8 * PAGE)
        tensor.map(0, 2 * PAGE)
        tensor.unmap(0, PAGE)
        client.reserve_static(1000, "weights")
        found = parse(prometheus.exposition(namespace))
    assert found["kvcached_device_capacity_bytes", ""] == CAPACITY
    assert found["kvcached_device_reserved_bytes", ""] == 4 * PAGE + 1000
    assert found["kvcached_device_free_bytes", ""] == CAPACITY - 4 * PAGE - 1000
    assert found["kvcached_device_clients", ""] == 1
    assert found["kvcached_client_committed_bytes", "engine"] == PAGE
    assert found["kvcached_client_static_bytes", "engine"] == 1000
    assert found["kvcached_client_min_bytes", "engine"] == 4 * PAGE
    assert found["kvcached_client_limit_bytes", "engine"] == 9 * PAGE
    assert found["kvcached_client_resident_bytes", "engine"] == 0  # mapped, never touched
    assert found["kvcached_client_maps_total", "engine"] == 1
    assert found["kvcached_client_unmaps_total", "engine"] == 1


def test_the_collector_agrees_with_the_text(device: Device, namespace: str) -> None:
    registry = CollectorRegistry()
    with device.client('odd "name" \\'):
        registry.register(prometheus.Collector(namespace, "host:0"))
        scraped = generate_latest(registry).decode()
        ours = prometheus.exposition(namespace, "host:0")
    assert parse(scraped) == parse(ours)
    assert ("kvcached_client_maps_total", 'odd "name" \\') in parse(ours)


def test_labels_separate_devices_and_processes(device: Device, namespace: str) -> None:
    with device.client("engine"):
        (family,) = [
            f for f in prometheus.families(namespace) if f.name == "kvcached_client_min_bytes"
        ]
    assert family.labels == ("namespace", "device", "client", "pid")
    assert family.samples == {(namespace, "host:0", "engine", str(os.getpid())): 0}


def test_clients_of_one_name_in_one_process_are_added_up(device: Device, namespace: str) -> None:
    with device.client("pool", min_bytes=PAGE), device.client("pool", min_bytes=2 * PAGE):
        found = parse(prometheus.exposition(namespace))
    assert found["kvcached_client_min_bytes", "pool"] == 3 * PAGE
    assert ("kvcached_client_limit_bytes", "pool") not in found


def test_another_device_is_left_out(device: Device, namespace: str) -> None:
    assert parse(prometheus.exposition(namespace, "host:7")) == {}


def test_the_text_needs_no_package(device: Device, namespace: str) -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        f"from kvcached import prometheus; print(prometheus.exposition({namespace!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert parse(done.stdout)["kvcached_device_capacity_bytes", ""] == CAPACITY
