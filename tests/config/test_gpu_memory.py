"""Memory of a GPU: contexts of idle engines, an engine's share, weights and KV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from prism.config.checks.memory_needs import GpuNeeds, check_static, memory_need
from prism.config.resolve import load, measured
from prism.config.schema.cluster_config import ClusterConfig, EngineConfig
from prism.engines import fake
from prism.engines.sglang.platform import gpu as sglang
from prism.errors import ConfigError
from tests.frontend.tiny_model import make_model

MIB = 1 << 20
NEEDS = GpuNeeds(
    context_bytes=500 * MIB,
    code_bytes=100 * MIB,
    driver_bytes=50 * MIB,
    ranks_bytes=60 * MIB,
    torch_min_bytes=70 * MIB,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_model(tmp_path / "a")
    monkeypatch.setenv("PRISM_FAKE", json.dumps({"cpu_reads_gpu": True}))
    monkeypatch.setattr(
        fake, "needs", lambda device: NEEDS if device.startswith("cuda:") else GpuNeeds()
    )
    return tmp_path


def loaded(folder: Path, capacity: str = "4GiB", **engine: Any) -> ClusterConfig:
    data = {
        "devices": [{"name": f"cuda:{n}", "capacity": capacity, "engines": 3} for n in range(2)],
        "models": [{"name": "a", "path": "a"}, {"name": "wide", "path": "a", "tp": 2}],
        "engine": {"adapter": "fake", **engine},
    }
    path = folder / "prism.yaml"
    path.write_text(yaml.safe_dump(data))
    return load(path)


def test_static_has_a_default_for_each_kind_of_device(folder: Path) -> None:
    engine = loaded(folder).engine
    assert engine.static_on("cuda:0") == 2048 * MIB
    assert engine.static_on("host:0") == 16 * MIB == EngineConfig().static_on("host:0")
    told = loaded(folder, static="1GiB").engine
    assert told.static_on("cuda:0") == told.static_on("host:0") == 1024 * MIB


def test_idle_engines_take_their_contexts_and_models_the_rest(folder: Path) -> None:
    config = loaded(folder)
    device = config.devices[0]
    assert (device.engines_bytes, device.models_bytes) == (1800 * MIB, 2296 * MIB)
    a, wide = config.models
    assert memory_need(a, device, config.engine).static_bytes == (2048 - 600) * MIB
    # A rank is one process more than the pool's, so that its context counts with the model.
    assert memory_need(wide, device, config.engine).static_bytes == 2048 * MIB


def test_a_model_that_fits_only_without_the_contexts_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, "3GiB")
    assert "3GiB is too small for any model" in str(caught.value)
    assert "fixed share 1.414GiB" in str(caught.value)
    assert "besides 1.758GiB of 3 idle engines" in str(caught.value)


def test_the_capacity_it_names_is_enough(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, "2GiB")
    enough = str(caught.value).split("raise capacity to ")[1].split(" ")[0]
    with pytest.raises(ConfigError, match=r"models\[1\]\.tp: wide needs"):  # no longer a's
        loaded(folder, enough)
    loaded(folder, "4GiB")


def test_too_small_a_static_names_one_that_would_do(folder: Path) -> None:
    """Includes NCCL, which the wide model's ranks need."""
    with pytest.raises(ConfigError) as caught:
        loaded(folder, static="700MiB")
    assert str(caught.value).endswith(
        "engine.static: 700MiB is too small for an engine on cuda:0: CUDA context and code 600MiB,"
        " graphs and NCCL 110MiB, torch at least 70MiB; set it to 780MiB or more, or leave the"
        " key out"
    )
    with pytest.raises(ConfigError, match="set it to 780MiB"):
        loaded(folder, static="779MiB")
    loaded(folder, static="780MiB")


def test_the_default_is_enough_for_what_sglang_plans(folder: Path) -> None:
    config = loaded(folder)
    check_static(config, "cuda:0", sglang.needs("cuda:0"))
    assert sglang.needs("host:0") == GpuNeeds()


def test_measured_contexts_replace_planned_ones(folder: Path) -> None:
    config = measured(loaded(folder), {"cuda:1": 300 * MIB})
    assert [d.idle_bytes // MIB for d in config.devices] == [600, 400]
    with pytest.raises(ConfigError, match="too small for any model"):
        measured(config, {"cuda:0": 1000 * MIB})
    with pytest.raises(ConfigError, match=r"engine\.static: 2GiB is too small"):
        measured(config, {"cuda:0": 2000 * MIB})


def test_host_devices_plan_nothing(folder: Path) -> None:
    (folder / "prism.yaml").write_text(
        yaml.safe_dump(
            {
                "devices": [{"name": "host:0", "capacity": "64MiB", "page": "64KiB"}],
                "models": [{"name": "a", "path": "a"}],
                "engine": {"adapter": "fake"},
            }
        )
    )
    config = load(folder / "prism.yaml")
    [device] = config.devices
    assert (device.idle_bytes, device.models_bytes) == (0, device.capacity_bytes)
    assert memory_need(config.models[0], device, config.engine).static_bytes == 16 * MIB


def test_a_model_on_gpus_has_each_degree_for_which_its_engine_has_memory(folder: Path) -> None:
    assert [model.degrees for model in loaded(folder).models] == [(1, 2), ()]
    path = folder / "prism.yaml"
    data = yaml.safe_load(path.read_text())
    data["models"] = [{"name": "a", "path": "a"}]
    least_mib = NEEDS.static_min_bytes(1) // MIB
    for static_mib, degrees in ((least_mib + 59, (1,)), (least_mib + 60, (1, 2))):
        data["engine"]["static"] = f"{static_mib}MiB"
        path.write_text(yaml.safe_dump(data))
        assert load(path).models[0].degrees == degrees
