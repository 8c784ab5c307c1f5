"""Detection of models that take images, and the memory of their vision towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcached.errors import InvalidArgumentError
from kvcached.models import VisionShape, vision_of_config
from prism.config.checks.memory_needs import EngineTraits
from prism.config.schema.cluster_config import EngineConfig, ModelYaml
from prism.errors import ConfigError
from prism.messages.model_spec import ImageSpec
from prism.models.config_values import is_number
from prism.models.files import DTYPE_BYTES, read_config
from prism.models.special_tokens import read_json

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_TOKEN_IDS = ("image_token_id", "image_token_index")
# Tokens of images in prompts, of families that have others for their vectors.
_PROMPT_TOKENS = {"llama4": "<|image|>"}
# Tiles of an image by the processors of transformers.
_TILES_MAX = {"internvl": 12, "llama4": 16}


def takes_images(data: ModelYaml, path: Path, key: str, traits: EngineTraits, tp: int) -> bool:
    """Returns whether the model in directory `path`, with the entry `data` of the YAML, takes
    images.

    By default it does if its family does, it has its processor's files, and the YAML has nothing
    for it that images cannot be combined with. Raises ConfigError that names `key`, the entry's.
    """
    if data.images is False:
        return False
    config = read_config(path, f"{key}.path")
    kind = str(config.get("model_type"))
    lacks = ""
    if kind not in traits.images:
        known = ", ".join(sorted(traits.images)) or "none"
        lacks = f"has model_type {kind!r}, of which engines take no images; give one of {known}"
    elif not any((path / name).is_file() for name in _PROCESSORS):
        lacks = f"does not have {_PROCESSORS[0]}; save the model's processor there"
    if lacks and data.images:
        raise ConfigError(f"{key}.images: {path} {lacks}, or remove the key")
    spread = tp > 1 and kind not in traits.image_ranks
    adapted = bool(data.lora) and kind not in traits.image_adapters
    others = {"lora": adapted, "tp": spread, "embeddings": bool(data.embeddings)}
    combined = [name for name, is_set in others.items() if is_set]
    if combined and data.images:
        text = "cannot be combined with images; remove one of them"
        raise ConfigError(f"{key}.{combined[0]}: {text}")
    return not lacks and not combined


def image_spec(
    path: Path, key: str, traits: EngineTraits, engine: EngineConfig, dtype: str
) -> ImageSpec:
    """Returns the images that the model in directory `path` takes. Raises ConfigError.

    Args:
        path: Directory of the model.
        key: YAML key of the model's entry, for messages.
        traits: Of the model's adapter.
        engine: Limits of engines.
        dtype: Of the weights in an engine.
    """
    config = read_config(path, f"{key}.path")
    step_bytes = _step_bytes(config, path, key, engine, DTYPE_BYTES[dtype])
    token_id, size_bytes = _token_id(config, path, key), traits.image_vectors_bytes + step_bytes
    return ImageSpec(token_id, size_bytes, _prompt_token_id(config, path, key, token_id))


def _token_id(config: dict[str, Any], path: Path, key: str) -> int:
    found = [config[name] for name in _TOKEN_IDS if name in config]
    if not found or type(found[0]) is not int or found[0] < 0:
        raise ConfigError(
            f"{key}.path: {path}/config.json lacks {_TOKEN_IDS[0]}, the token of images; complete"
            " the file, or set images: false"
        )
    return int(found[0])


def _prompt_token_id(config: dict[str, Any], path: Path, key: str, token_id: int) -> int:
    """Returns the token that a chat template has for an image."""
    text = _PROMPT_TOKENS.get(config["model_type"])
    if text is None:
        return token_id
    added = read_json(path / "tokenizer.json").get("added_tokens") or ()
    found = [each["id"] for each in added if each["content"] == text]
    if not found:
        raise ConfigError(
            f"{key}.path: {path}/tokenizer.json lacks {text}, the token of an image; complete the"
            " file, or set images: false"
        )
    return int(found[0])


def _step_bytes(
    config: dict[str, Any], path: Path, key: str, engine: EngineConfig, number_bytes: int
) -> int:
    """Returns the memory of the vision tower's largest step: all patches of the images of which a
    prefill chunk has a token. The first and the last may be only partly in the chunk."""
    try:
        shape = vision_of_config(config)
    except InvalidArgumentError as error:
        raise ConfigError(f"{key}.path: {path}: {error}") from error
    assert shape is not None
    chunk = engine.prefill_chunk_tokens * shape.patches_per_token
    patches = 2 * _pixels_max(path, key, config, shape) // shape.patch_pixels + chunk
    return patches * shape.patch_numbers * number_bytes


def _pixels_max(path: Path, key: str, config: dict[str, Any], shape: VisionShape) -> int:
    """Returns the pixels of the largest image after the processor, which makes larger ones
    smaller, or cuts them into a number of tiles."""
    settings: dict[str, Any] = {}
    for name in reversed(_PROCESSORS):
        found = read_json(path / name)
        part = found.get("image_processor")
        settings |= part if isinstance(part, dict) else found
    if shape.tile_pixels:
        most = settings.get("max_patches") or _TILES_MAX.get(config["model_type"], 0)
        tiles = shape.tiles or _positive(most, path, key) + 1  # and the whole image
        return tiles * shape.tile_pixels
    size = settings.get("size") or {}
    if not isinstance(size, dict):
        raise _wrong_size(path, key, size)
    if (pixels := settings.get("max_pixels") or size.get("max_pixels")) is not None:
        return _positive(pixels, path, key)
    edge = size.get("longest_edge")
    if config["model_type"] in ("llava", "mistral3"):
        edge = edge or config["vision_config"].get("image_size", 1540)
        return _positive(edge, path, key) ** 2
    if config["model_type"] == "glm4v":  # the area of two frames, as which it takes an image
        return _positive(edge or 28 * 28 * 15000, path, key) // 2
    return _positive(edge or 28 * 28 * 1280, path, key)  # for Qwen's processors, an area


def _positive(value: object, path: Path, key: str) -> int:
    if is_number(value) and value >= 1:
        return int(value)
    raise _wrong_size(path, key, value)


def _wrong_size(path: Path, key: str, value: object) -> ConfigError:
    return ConfigError(
        f"{key}.path: {path}/{_PROCESSORS[0]} has a size of images of {value!r:.40}; correct the"
        " file, or set images: false"
    )
