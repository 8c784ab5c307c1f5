"""Models that take images: by default, by the YAML, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcached import Checkpoint
from prism.config.resolve import load
from prism.errors import ConfigError
from prism.messages.model_spec import ModelSpec
from tests import vision_models
from tests.families import VOCAB_SIZE

pytestmark = [pytest.mark.slow, pytest.mark.sglang]


def loaded(folder: Path, **model: Any) -> ModelSpec:
    path = folder / "prism.yaml"
    devices = [{"name": "host:0", "capacity": "1GiB", "page": "64KiB"}]
    entry = {"name": "m", "path": str(folder), **model}
    path.write_text(yaml.safe_dump({"devices": devices, "models": [entry]}))
    return load(path).models[0]


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return vision_models.write("mistral3", tmp_path)


def test_a_vision_tower_counts_where_it_is_loaded(folder: Path) -> None:
    numbers = sum(p.numel() for p in vision_models.whole("mistral3").parameters())
    model, text = loaded(folder), loaded(folder, images=False)
    assert model.weight_bytes == 4 * numbers
    tower = [t for n, t in Checkpoint.open(folder).tensors.items() if "language_model" not in n]
    tower = [tensor for tensor in tower if tensor.name != "lm_head.weight"]
    assert text.weight_bytes == model.weight_bytes - sum(t.spec.size_bytes for t in tower)
    assert model.images is not None
    assert (model.images.token_id, text.images) == (VOCAB_SIZE, None)
    # Two images of 8 x 8 patches, and four for each of 512 tokens of a chunk. Of each: six times
    # the hidden size of 32, and three times the MLP's 64.
    step_bytes = (2 * 64 + 4 * 512) * (6 * 32 + 3 * 64) * 4
    assert model.besides_weights_bytes == step_bytes + (64 << 20)
    change(folder / "preprocessor_config.json", size={"longest_edge": 56})
    smaller = loaded(folder).besides_weights_bytes
    assert model.besides_weights_bytes - smaller == 2 * 48 * 384 * 4


def test_what_has_no_images_by_default(folder: Path) -> None:
    assert loaded(folder, tp=1).images is not None
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").unlink()
    assert loaded(folder).images is None
    says = r"models\[0\].images: .* does not have preprocessor_config"
    with pytest.raises(ConfigError, match=says):
        loaded(folder, images=True)


def test_what_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\[0\].tp: cannot be combined with images"):
        loaded(folder, images=True, tp=2)
    with pytest.raises(ConfigError, match="engines take no images; give one of none"):
        loaded(folder, images=True, adapter="fake")
    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"]
    file = folder / "config.json"
    change(file, vision_config=vision | {"hidden_act": "gelu"})
    with pytest.raises(ConfigError, match="has hidden_act 'gelu' in vision_config"):
        loaded(folder)
    change(file, vision_config={k: v for k, v in vision.items() if k != "hidden_act"})
    with pytest.raises(ConfigError, match="has hidden_act 'gelu' in vision_config"):
        loaded(folder)
    change(file, vision_config=vision | {"num_hidden_layers": 3})
    with pytest.raises(ConfigError, match="parameters in its vision tower and projector, but"):
        loaded(folder)
    assert loaded(folder, images=False).images is None
    change(file, vision_config=vision | {"hidden_size": None})
    with pytest.raises(ConfigError, match="hidden_size"):
        loaded(folder)
    file.write_text(json.dumps(config))
    change(file, model_type="gemma3")
    with pytest.raises(ConfigError, match="model_type 'gemma3', of which engines take no images"):
        loaded(folder, images=True)


@pytest.mark.parametrize("size", [1540, {"longest_edge": "a"}, {"max_pixels": -1}])
def test_a_wrong_size_of_images_is_named(folder: Path, size: Any) -> None:
    change(folder / "preprocessor_config.json", size=size)
    with pytest.raises(ConfigError, match=r"has a size of images of .*, or set images: false"):
        loaded(folder)
    assert loaded(folder, images=False).images is None
