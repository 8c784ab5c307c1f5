"""Sizes of models in a cluster of many devices."""

from __future__ import annotations

import pytest

from prism.cluster.state import sizes
from prism.cluster.state.sizes import Sizes
from prism.config.checks import memory_needs as memory
from prism.config.checks.memory_needs import MemoryNeed, check_memory, memory_need
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig, EngineConfig
from prism.errors import ConfigError
from prism.messages.model_spec import ModelSpec
from tests.cluster.conftest import spec

MODELS, DEVICES = 30, 20


def cluster(*more: DeviceConfig, **model: object) -> ClusterConfig:
    """Devices alike, and others."""
    devices = [DeviceConfig(f"host:{i}", 1 << 24, 4096, 2) for i in range(DEVICES)]
    models = [spec(f"m{i}", **model) for i in range(MODELS)]
    engine = EngineConfig(adapter="fake", static_bytes=0)
    return ClusterConfig("x", "", "", "prism", [*devices, *more], models, engine=engine)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Devices that a model's need was computed for."""
    found: list[str] = []

    def noted(model: ModelSpec, device: DeviceConfig, engine: EngineConfig) -> MemoryNeed:
        found.append(device.name)
        return memory_need(model, device, engine)

    for module in (sizes, memory):
        monkeypatch.setattr(module, "memory_need", noted)
    return found


def test_a_model_s_size_is_computed_once_for_devices_that_are_alike(asked: list[str]) -> None:
    """Checks a regression: with 200 devices and 2,000 models a start took a minute."""
    other = DeviceConfig("host:99", 1 << 24, 8192, 2)
    found = Sizes(cluster(other), learn=False)
    assert len(asked) == 2 * MODELS
    largest = max(
        memory_need(spec("m0"), d, EngineConfig(static_bytes=0)).total_bytes
        for d in cluster(other).devices
    )
    assert found.of("m0")[1].total_bytes == largest


@pytest.mark.parametrize("tp", [1, 2])
def test_whether_all_fits_is_not_computed_for_each_device_and_model(
    asked: list[str], tp: int
) -> None:
    check_memory(cluster(tp=tp, num_kv_heads=2, token_bytes=256))
    assert len(asked) <= DEVICES + 2 * MODELS


def test_a_device_that_is_too_small_for_all_is_still_found() -> None:
    with pytest.raises(ConfigError, match=r"devices\[20\].capacity: .* too small for any model"):
        check_memory(cluster(DeviceConfig("host:99", 8192, 4096, 2)))
