"""Models that take images: by default, by the YAML, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load_file, save_file

from kvcached import Checkpoint
from kvcached.models import shape_of_config, vision_of_config
from prism.config.checks.memory_needs import shard_of
from prism.config.resolve import load
from prism.engines.sglang.platform.supported_models import refuses
from prism.errors import ConfigError
from prism.frontend.images.preparation import Preparer
from prism.frontend.requests.prompt_images import with_images
from prism.messages.model_spec import ModelSpec
from prism.models.hugging_face import import_transformers
from prism.models.lora_files import WEIGHTS
from prism.models.text_part import text_config, text_weight
from tests import vision_models
from tests.families import VOCAB_SIZE
from tests.sglang.adapters import ALL, make_adapter

pytestmark = [pytest.mark.slow, pytest.mark.sglang]


def loaded(folder: Path, **model: Any) -> ModelSpec:
    path = folder / "prism.yaml"
    sizes = {"capacity": "1GiB", "page": "64KiB"}
    devices = [{"name": f"host:{number}"} | sizes for number in range(2)]
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


@pytest.mark.parametrize(
    ("kind", "pixels"),
    [
        # One tile, the grid of 112 x 112 and the whole, and as many as the processor's max_patches.
        ("llava", 56**2),
        ("llava_next", 5 * 56**2),
        ("internvl", 4 * 56**2),
        ("llama4", 5 * 56**2),
        ("llava-pixtral", 112**2),
        ("qwen2_vl", 64 * 14**2),
        ("glm4v", 64 * 14**2),
    ],
)
def test_the_largest_image_is_the_processors(tmp_path: Path, kind: str, pixels: int) -> None:
    model = loaded(vision_models.write(kind, tmp_path))
    shape = vision_of_config(json.loads((tmp_path / "config.json").read_text()))
    assert shape is not None
    assert model.images is not None
    patches = 2 * pixels // shape.patch_pixels + 512 * shape.patches_per_token
    assert model.besides_weights_bytes == patches * shape.patch_numbers * 4 + (64 << 20)
    numbers = sum(p.numel() for p in vision_models.whole(kind).parameters())
    assert model.weight_bytes == 4 * numbers
    differs = kind == "llama4"
    assert model.images.prompt_token_id == VOCAB_SIZE + (3 if differs else 0)


def test_an_image_is_prepared_where_its_family_has_another_token(tmp_path: Path) -> None:
    """Replaces Llama 4's <|image|> by an image's tokens, of which <|patch|> stand for vectors."""
    model = loaded(vision_models.write("llama4", tmp_path))
    image = Preparer().prepare(model.path, "float32", vision_models.png(0, (120, 60)), 1 << 20)
    assert model.images is not None
    token, placeholder = model.images.token_id, model.images.prompt_token_id
    assert placeholder is not None
    prompt, [placed] = with_images([5, placeholder, 6], [image], token, placeholder)
    assert prompt == [5, *image.token_ids, 6]
    vectors = sum(last - first + 1 for first, last in placed.runs)
    assert vectors == prompt.count(token) == 3 * 4  # two tiles and the whole image


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


def test_each_of_two_devices_has_the_vision_tower(tmp_path: Path) -> None:
    model = loaded(vision_models.write("llava", tmp_path), tp=2)
    assert model.images is not None
    text = loaded(tmp_path, tp=2, images=False)
    tower_bytes = model.weight_bytes - text.weight_bytes
    part_bytes = shard_of(model, 2).weight_bytes - shard_of(text, 2).weight_bytes
    assert part_bytes == tower_bytes > 0


def test_adapters_change_the_language_model_alone(tmp_path: Path) -> None:
    folder = vision_models.write("llava", tmp_path / "llava")
    adapter = make_adapter(tmp_path / "adapter", folder)
    entry = [{"name": "own", "path": str(adapter)}]
    model = loaded(folder, lora=entry)
    assert model.images is not None
    assert set(model.lora.shapes) == set(ALL)
    with pytest.raises(ConfigError, match="not served for this family, or without images; merge"):
        loaded(folder, lora=entry, images=False)
    other = vision_models.write("mistral3", tmp_path / "mistral3")
    with pytest.raises(ConfigError, match=r"models\[0\].lora: cannot be combined with images"):
        loaded(other, lora=entry, images=True)
    changed = load_file(adapter / WEIGHTS)
    names = {name: name.replace("language_model.model", "vision_tower.encoder") for name in changed}
    save_file({names[name]: each for name, each in changed.items()}, adapter / WEIGHTS)
    with pytest.raises(ConfigError, match="adapters may change the projections of attention"):
        loaded(folder, lora=entry)


def test_weights_of_bitsandbytes_are_refused(folder: Path) -> None:
    change(folder / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(ConfigError, match="bitsandbytes"):
        loaded(folder)


@pytest.mark.parametrize(("kind", "is_refused"), [("llava", True), ("qwen2_5_vl", False)])
def test_a_quantized_tower_is_refused_where_it_is_that_of_transformers(
    tmp_path: Path, kind: str, is_refused: bool
) -> None:
    folder = vision_models.write(kind, tmp_path)
    described = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    change(folder / "config.json", quantization_config=described)
    assert refuses(folder, images=True) == ""
    tensors = load_file(folder / "model.safetensors")
    tower = next(n for n in tensors if text_weight(n) is None and tensors[n].ndim == 2)
    tensors[f"{tower}_scale"] = np.ones(1, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert ("a vision tower quantized by fp8" in refuses(folder, images=True)) == is_refused


def test_positions_that_an_old_llava_saves_are_not_parameters(tmp_path: Path) -> None:
    folder = vision_models.write("llava", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["vision_tower.embeddings.position_ids"] = np.arange(17)[None]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert loaded(folder).images is not None


def test_positions_that_sglang_lacks_are_refused(tmp_path: Path) -> None:
    folder = vision_models.write("qwen3_vl_moe", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    change(folder / "config.json", text_config=config["text_config"] | {"rope_parameters": rope})
    with pytest.raises(ConfigError, match="lacks mrope_section in rope_parameters"):
        loaded(folder)
    vision = config["vision_config"] | {"deepstack_visual_indexes": [0]}
    change(folder / "config.json", text_config=config["text_config"], vision_config=vision)
    with pytest.raises(ConfigError, match="has 1 deepstack_visual_indexes, but SGLang adds 3"):
        loaded(folder)


def test_sizes_that_a_published_llava_leaves_out(tmp_path: Path) -> None:
    """Reads the text_config of llava-hf/llava-1.5-7b-hf, which has 7 billion parameters."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
    }
    config = {"model_type": "llava", "text_config": text, "vision_config": vision}
    tower = vision_of_config(config)
    assert tower is not None
    transformers = import_transformers()
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        whole = transformers.AutoModelForImageTextToText.from_config(made)
    expected = sum(p.numel() for p in whole.parameters())
    language_model = shape_of_config(text_config(config))
    assert language_model == shape_of_config(config)
    assert language_model.parameters + tower.parameters == expected
