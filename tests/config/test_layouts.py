"""engine.kv_layout: the arrangement of each model's KV, and the memory that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from kvcached.layouts.choice import QUANTA_SHARE_MAX
from prism.config.checks.memory_needs import layout_of, memory_need
from prism.config.resolve import load
from prism.config.resolved import read_resolved, write_resolved
from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import ConfigError
from tests.frontend.tiny_model import make_model


def loaded(folder: Path, kv_layout: str | None, **device: Any) -> ClusterConfig:
    """Returns a configuration with four copies of a tiny model; "d" has a device for itself."""
    for name in "abcd":
        make_model(folder / name)
    wide = {"name": "host:0", "capacity": "64MiB", "page": "64KiB", **device}
    own = {"name": "host:1", "capacity": "1GiB", "page": "4KiB"}
    models = [{"name": name, "path": name, "device": "host:0"} for name in "abc"]
    data = {
        "devices": [wide, own],
        "models": [*models, {"name": "d", "path": "d", "device": "host:1"}],
        "engine": {"adapter": "fake", "static": "1MiB"},
    }
    if kv_layout is not None:
        data["engine"]["kv_layout"] = kv_layout
    path = folder / "prism.yaml"
    path.write_text(yaml.safe_dump(data))
    return load(path)


def arrangements(config: ClusterConfig) -> list[str]:
    return [model.kv_arrangement for model in config.models]


def test_per_layer_is_the_default(tmp_path: Path) -> None:
    assert arrangements(loaded(tmp_path, None)) == ["per_layer"] * 4
    config = loaded(tmp_path, "token_interleaved")
    assert arrangements(config) == ["token_interleaved"] * 4


def test_auto_goes_by_quantum_and_neighbours(tmp_path: Path) -> None:
    config = loaded(tmp_path, "auto")
    small = config.models[0]
    stock = loaded(tmp_path, "per_layer").models[0]
    share = 3 * layout_of(stock).quantum_bytes(64 << 10) / (64 << 20)
    assert share < QUANTA_SHARE_MAX
    assert arrangements(config) == ["per_layer"] * 4
    crowded = loaded(tmp_path, "auto", capacity="16MiB", page="256KiB")
    assert 3 * layout_of(stock).quantum_bytes(256 << 10) / (16 << 20) > QUANTA_SHARE_MAX
    assert arrangements(crowded) == ["token_interleaved"] * 3 + ["per_layer"]
    chosen = layout_of(crowded.models[0])
    assert chosen.quantum_bytes(256 << 10) < layout_of(stock).quantum_bytes(256 << 10)
    assert crowded.models[0].token_bytes == sum(chosen.buffer_token_bytes) >= small.token_bytes


def test_what_is_chosen_is_what_is_needed_and_sent(tmp_path: Path) -> None:
    config = loaded(tmp_path, "token_interleaved", page="256KiB")
    model, device = config.models[0], config.devices[0]
    need = memory_need(model, device, config.engine)
    layout = layout_of(model)
    assert need.kv_bytes == layout.need_bytes(model.context_length, device.page_bytes)
    stock = loaded(tmp_path, "per_layer", page="256KiB")
    assert need.kv_bytes < memory_need(stock.models[0], device, config.engine).kv_bytes
    write_resolved(config, tmp_path / "resolved.json")
    assert read_resolved(tmp_path / "resolved.json").models == config.models


def test_a_gap_behind_a_token_is_kept(tmp_path: Path) -> None:
    dense = loaded(tmp_path, "token_interleaved", capacity="1GiB").models[0]
    assert layout_of(dense).padded_token_bytes is None
    padded = msgspec.structs.replace(dense, token_bytes=dense.token_bytes + 64)
    assert layout_of(padded).padded_token_bytes == padded.token_bytes
    assert layout_of(padded).token_bytes == dense.token_bytes


@pytest.mark.parametrize("wrong", ["block_interleaved", "", "by_head"])
def test_other_layouts_are_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_layout: unknown value"):
        loaded(tmp_path, wrong)
