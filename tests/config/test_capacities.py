"""Capacities of devices that the YAML does not give as a size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import kvcached
from kvcached import GpuFacts
from kvcached.errors import NoDriverError
from prism.config.reload import reloaded
from prism.config.resolve import load
from prism.errors import ConfigError
from tests.frontend.tiny_model import make_model

GIB = 1 << 30
FACTS = GpuFacts("NVIDIA H200", "GPU-1", "580", mig=False, total_bytes=140 * GIB, free_bytes=GIB)


def write(folder: Path, device: dict[str, Any]) -> Path:
    make_model(folder / "a")
    data = {
        "devices": [{"page": "64KiB", **device}],
        "models": [{"name": "a", "path": "a", "context_length": 100}],
        "engine": {"adapter": "fake", "static": "1MiB"},
    }
    path = folder / "prism.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def capacity(path: Path, **options: Any) -> int:
    [device] = load(path, **options).devices
    return device.capacity_bytes


@pytest.mark.parametrize(
    ("text", "expected"), [("90%", 126 * GIB), ("8G", 8 * GIB), (None, GIB * 9 // 10)]
)
def test_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, expected: int
) -> None:
    monkeypatch.setenv("PRISM_FAKE", '{"cpu_reads_gpu": true}')
    monkeypatch.setattr(kvcached, "gpu_facts", {"cuda:0": FACTS}.__getitem__)
    given = {"name": "cuda:0"} | ({"capacity": text} if text else {})
    assert 0 <= expected - capacity(write(tmp_path, given)) < 1 << 16


def test_on_a_host_device(tmp_path: Path) -> None:
    half = psutil.virtual_memory().total // 2
    assert 0 <= half - capacity(write(tmp_path, {"name": "host:0", "capacity": "50%"})) < 1 << 16
    with pytest.raises(ConfigError, match=r"devices\[0\].capacity: is required for a host device"):
        load(write(tmp_path, {"name": "host:0"}))


def test_a_running_cluster_keeps_its_size_and_refuses_another(tmp_path: Path) -> None:
    path = write(tmp_path, {"name": "host:0", "capacity": "50%"})
    sizes = {"host:0": 64 << 20}
    running = load(path, capacities=sizes)
    assert running.devices[0].capacity_bytes == 64 << 20
    assert reloaded(running, load(path, capacities=sizes), []) == running
    for text in ("40%", "64MiB"):
        other = load(write(tmp_path, {"name": "host:0", "capacity": text}), capacities=sizes)
        with pytest.raises(ConfigError, match=r"devices\[0\].capacity: cannot be changed"):
            reloaded(running, other, [])


def test_a_gpu_whose_memory_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = GpuFacts("NVIDIA H200", "GPU-1", "580", mig=True)
    monkeypatch.setattr(kvcached, "gpu_facts", {"cuda:0": facts}.__getitem__)
    with pytest.raises(ConfigError, match="does not report cuda:0's memory; give a size"):
        load(write(tmp_path, {"name": "cuda:0", "capacity": "90%"}))


def test_a_wrong_name_is_the_first_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'gpu:0' is not a valid device"):
        load(write(tmp_path, {"name": "gpu:0"}))


def test_a_gpu_whose_memory_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: str) -> GpuFacts:
        raise NoDriverError("NVML cannot be loaded")

    monkeypatch.setattr(kvcached, "gpu_facts", refuse)
    with pytest.raises(ConfigError, match=r"cuda:0 cannot be read .*; give a size such as 70"):
        load(write(tmp_path, {"name": "cuda:0"}))


@pytest.mark.parametrize("text", ["0%", "101%", "x%", "-5%", "nan%"])
def test_wrong_parts(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="is not a part of the memory; write more than 0%"):
        load(write(tmp_path, {"name": "host:0", "capacity": text}))


def test_other_machines_need_sizes(tmp_path: Path) -> None:
    path = write(tmp_path, {"name": "host:0"})
    data = yaml.safe_load(path.read_text())
    node = {"name": "n", "address": "127.0.0.1", "devices": [{"name": "host:0", "capacity": "9%"}]}
    path.write_text(yaml.safe_dump(data | {"devices": [], "nodes": [node], "redis": "redis://h"}))
    with pytest.raises(ConfigError, match="must be a size such as 70GiB, since other machines"):
        load(path)
