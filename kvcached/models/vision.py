"""Shape of the vision tower of a model that takes images, with the projection of its vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvcached.checks import checked, instance_of
from kvcached.errors import InvalidArgumentError
from kvcached.models.config_keys import ConfigKeys, shown, wrong
from kvcached.models.parts import linear, mlp
from kvcached.models.reading import shape_of_config


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Shape of a vision tower."""

    parameters: int
    """Number of parameters in memory."""
    patch_pixels: int
    """Pixels of a patch, one of the inputs of its attention."""
    patches_per_token: int
    """Patches that become one token of the prompt."""
    patch_numbers: int
    """Numbers that the tower holds at a time for each patch: in a layer the residual, its norm, Q,
    K, V, the output of attention, and the MLP's inner ones; and outputs of layers that it keeps."""
    tile_pixels: int = 0
    """Pixels of the tiles that images are cut into (0: they are not)."""
    tiles: int = 0
    """Largest number of tiles of an image, if the config.json has it (0: the processor has it)."""


@checked(config=instance_of(Mapping))
def vision_of_config(config: Mapping[str, Any]) -> VisionShape | None:
    """Returns the shape of the vision tower that a config.json describes, None if it describes none
    of a known family. Raises InvalidArgumentError with the key for missing and wrong values."""
    read, defaults = _FAMILIES.get(str(config.get("model_type")), (None, _QWEN))
    if read is None:
        return None
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise wrong("vision_config", vision, "an object")
    return read(ConfigKeys(vision, defaults), config)


def _mistral3(keys: ConfigKeys, config: Mapping[str, Any]) -> VisionShape:
    """Returns the shape of Mistral 3: Pixtral's tower, and a projector that merges patches."""
    hidden = keys.integer("hidden_size")
    whole = ConfigKeys(config, {"spatial_merge_size": 2, "multimodal_projector_bias": False})
    merged, bias = whole.integer("spatial_merge_size") ** 2, whole.flag("multimodal_projector_bias")
    if (layers := config.get("vision_feature_layer", -1)) != -1:
        raise InvalidArgumentError(
            f"config.json has vision_feature_layer {shown(layers)}, but only the last layer (-1) is"
            " known; give another model"
        )
    projector = hidden + linear(hidden * merged, hidden) + _projector(hidden, config, bias)
    total = _pixtral(keys) + projector
    return VisionShape(total, _side(keys, "patch_size") ** 2, merged, _numbers(keys, gated=True))


def _llava(keys: ConfigKeys, config: Mapping[str, Any]) -> VisionShape:
    """Returns the shape of LLaVA: one of several towers, of which all layers' outputs are kept."""
    kind = str(keys.get("model_type"))
    if kind not in _TOWERS:
        raise wrong("vision_config.model_type", kind, f"one of {', '.join(_TOWERS)}")
    count, defaults = _TOWERS[kind]
    keys = keys.with_defaults(defaults)
    hidden = keys.integer("hidden_size")
    bias = ConfigKeys(config, {"multimodal_projector_bias": True}).flag("multimodal_projector_bias")
    selected = config.get("vision_feature_layer", -2)
    inputs = hidden * (len(selected) if isinstance(selected, list) else 1)
    is_whole = kind == "pixtral"
    kept = keys.layers("num_hidden_layers") * hidden
    return VisionShape(
        count(keys) + _projector(inputs, config, bias),
        _side(keys, "patch_size") ** 2,
        1,
        _numbers(keys, gated=is_whole) + kept,
        0 if is_whole else _side(keys, "image_size") ** 2,
        0 if is_whole else 1,
    )


def _llava_next(keys: ConfigKeys, config: Mapping[str, Any]) -> VisionShape:
    """Returns the shape of LLaVA-NeXT: the whole image and tiles in one of several grids, and a
    vector at the ends of their lines."""
    shape = _llava(keys, config)
    grids = config.get("image_grid_pinpoints") or _GRIDS
    try:
        areas = [height * width for height, width in grids]
    except (TypeError, ValueError):
        areas = []
    if not areas or not all(isinstance(area, int) and area > 0 for area in areas):
        raise wrong("image_grid_pinpoints", grids, "a list of heights and widths")
    tiles = 1 + max(areas) // max(shape.tile_pixels, 1)
    return replace(shape, parameters=shape.parameters + _text_hidden(config), tiles=tiles)


def _internvl(keys: ConfigKeys, config: Mapping[str, Any]) -> VisionShape:
    """Returns the shape of InternVL: scaled outputs of attention and MLP, and a projector of merged
    patches."""
    hidden, ffn = keys.integer("hidden_size"), keys.integer("intermediate_size")
    norm = hidden if keys.get("norm_type") == "rms_norm" else 2 * hidden
    ratio = ConfigKeys(config, {"downsample_ratio": 0.5}).number("downsample_ratio")
    merged = round(1 / ratio**2)
    attention = linear(hidden, 3 * hidden, keys.flag("attention_bias"))
    attention += linear(hidden, hidden, bias=True)
    attention += 2 * hidden if keys.flag("use_qk_norm") else 0
    layer = attention + mlp(hidden, ffn, gated=False, bias=True).parameters + 2 * norm + 2 * hidden
    tower = _patches(keys, hidden, bias=True) + keys.layers("num_hidden_layers") * layer
    tower += hidden * (2 if keys.flag("use_mask_token") else 1)  # the class's, and the mask's
    if keys.flag("use_absolute_position_embeddings"):
        tower += (_tile_patches(keys) + 1) * hidden
    if not keys.flag("use_mean_pooling"):
        tower += 2 * hidden
    inputs = hidden * merged
    total = tower + 2 * inputs + _projector(inputs, config, bias=True)
    return VisionShape(
        total,
        _side(keys, "patch_size") ** 2,
        merged,
        _numbers(keys, gated=False),
        _side(keys, "image_size") ** 2,
    )


def _llama4(keys: ConfigKeys, config: Mapping[str, Any]) -> VisionShape:
    """Returns the shape of Llama 4: CLIP's tower without the bias-free projector, and an MLP of
    merged patches."""
    hidden, outputs = keys.integer("hidden_size"), keys.integer("projector_output_dim")
    merged = round(1 / keys.number("pixel_shuffle_ratio") ** 2)
    adapter = linear(keys.integer("intermediate_size"), keys.integer("projector_input_dim"))
    adapter += linear(outputs, outputs)
    total = _clip(keys) + adapter
    total += linear(keys.integer("vision_output_dim"), _text_hidden(config))
    return VisionShape(
        total,
        _side(keys, "patch_size") ** 2,
        merged,
        _numbers(keys, gated=False) + hidden,
        _side(keys, "image_size") ** 2,
    )


def _qwen2(keys: ConfigKeys, _: Mapping[str, Any]) -> VisionShape:
    """Returns the shape of Qwen2-VL: plain MLPs, and norms with biases."""
    hidden, outputs = keys.integer("embed_dim"), keys.integer("hidden_size")
    ffn = int(hidden * keys.number("mlp_ratio"))
    layer = _attention(hidden) + mlp(hidden, ffn, gated=False, bias=True).parameters + 4 * hidden
    tower = _patches(keys, hidden) + keys.layers("depth") * layer
    total = tower + 2 * hidden + _merger(keys, hidden, outputs)
    return _qwen(keys, total, 6 * hidden + 2 * ffn)


def _qwen2_5(keys: ConfigKeys, _: Mapping[str, Any]) -> VisionShape:
    """Returns the shape of Qwen2.5-VL: gated MLPs with biases, and norms without."""
    hidden, ffn = keys.integer("hidden_size"), keys.integer("intermediate_size")
    layer = _attention(hidden) + mlp(hidden, ffn, bias=True).parameters + 2 * hidden
    merger = _merger(keys, hidden, keys.integer("out_hidden_size"))
    tower = _patches(keys, hidden) + keys.layers("depth") * layer
    return _qwen(keys, tower + hidden + merger, 6 * hidden + 3 * ffn)


def _qwen3(keys: ConfigKeys, _: Mapping[str, Any]) -> VisionShape:
    """Returns the shape of Qwen3-VL and Qwen3.5: plain MLPs, embeddings of positions, and mergers
    of inner layers (DeepStack), if there are any."""
    hidden, ffn = keys.integer("hidden_size"), keys.integer("intermediate_size")
    layer = _attention(hidden) + mlp(hidden, ffn, gated=False, bias=True).parameters + 4 * hidden
    merged = hidden * keys.integer("spatial_merge_size") ** 2
    merger = _merger(keys, hidden, keys.integer("out_hidden_size"))
    inner = len(keys.integers("deepstack_visual_indexes") or ())
    tower = _patches(keys, hidden, bias=True) + keys.layers("depth") * layer
    tower += keys.integer("num_position_embeddings") * hidden
    total = tower + 2 * hidden + merger + inner * (2 * merged + merger)
    return _qwen(keys, total, 6 * hidden + 2 * ffn)


def _glm4v(keys: ConfigKeys, _: Mapping[str, Any]) -> VisionShape:
    """Returns the shape of GLM-4V: gated MLPs, embeddings of positions, and a convolution that
    merges patches before a gated MLP."""
    hidden, outputs = keys.integer("hidden_size"), keys.integer("out_hidden_size")
    merged = keys.integer("spatial_merge_size") ** 2
    attention = linear(hidden, 3 * hidden, keys.flag("attention_bias")) + linear(hidden, hidden)
    layer = attention + mlp(hidden, outputs).parameters + 2 * hidden
    tower = _patches(keys, hidden, bias=True) + keys.layers("depth") * layer
    tower += _tile_patches(keys) * hidden + 2 * hidden + linear(merged * hidden, outputs, bias=True)
    merger = linear(outputs, outputs) + 2 * outputs
    merger += mlp(outputs, keys.integer("intermediate_size")).parameters
    return _qwen(keys, tower + merger, 6 * hidden + 3 * outputs)


def _qwen(keys: ConfigKeys, parameters: int, patch_numbers: int) -> VisionShape:
    merged = keys.integer("spatial_merge_size") ** 2
    return VisionShape(parameters, keys.integer("patch_size") ** 2, merged, patch_numbers)


def _pixtral(keys: ConfigKeys) -> int:
    """Returns the parameters of Pixtral's tower: gated MLPs, and no biases."""
    hidden, ffn = keys.integer("hidden_size"), keys.integer("intermediate_size")
    layer = 4 * linear(hidden, hidden) + mlp(hidden, ffn).parameters + 2 * hidden
    return _patches(keys, hidden) + hidden + keys.layers("num_hidden_layers") * layer


def _clip(keys: ConfigKeys) -> int:
    """Returns the parameters of CLIP's tower: one vector for the image, and norms at both ends."""
    hidden = keys.integer("hidden_size")
    tower = _patches(keys, hidden) + (_tile_patches(keys) + 2) * hidden + 4 * hidden
    return tower + keys.layers("num_hidden_layers") * _plain_layer(keys, hidden)


def _siglip(keys: ConfigKeys) -> int:
    """Returns the parameters of SigLIP's tower, with the head that answers do not need."""
    hidden, layer = keys.integer("hidden_size"), _plain_layer(keys, keys.integer("hidden_size"))
    tower = _patches(keys, hidden, bias=True) + _tile_patches(keys) * hidden + 2 * hidden
    head = layer - hidden if keys.flag("vision_use_head") else 0  # one norm, and a query
    return tower + keys.layers("num_hidden_layers") * layer + head


def _plain_layer(keys: ConfigKeys, hidden: int) -> int:
    ffn = keys.integer("intermediate_size")
    return _attention(hidden) + mlp(hidden, ffn, gated=False, bias=True).parameters + 4 * hidden


def _attention(hidden: int) -> int:
    return linear(hidden, 3 * hidden, bias=True) + linear(hidden, hidden, bias=True)


def _patches(keys: ConfigKeys, hidden: int, *, bias: bool = False) -> int:
    """Returns the parameters of the convolution of patches."""
    frames = keys.count("temporal_patch_size", default=1)
    inputs = _side(keys, "patch_size") ** 2 * frames
    return linear(inputs * keys.integer("in_channels", "num_channels"), hidden, bias)


def _merger(keys: ConfigKeys, hidden: int, outputs: int) -> int:
    """Returns the parameters of the MLP of merged patches, without a norm."""
    merged = hidden * keys.integer("spatial_merge_size") ** 2
    return linear(merged, merged, bias=True) + linear(merged, outputs, bias=True)


def _projector(inputs: int, config: Mapping[str, Any], bias: bool) -> int:
    """Returns the parameters of two matrices that make vectors of the language model."""
    hidden = _text_hidden(config)
    return linear(inputs, hidden, bias) + linear(hidden, hidden, bias)


def _text_hidden(config: Mapping[str, Any]) -> int:
    return shape_of_config(config).hidden_size


def _numbers(keys: ConfigKeys, *, gated: bool) -> int:
    ffn = keys.integer("intermediate_size")
    return 6 * keys.integer("hidden_size") + (3 if gated else 2) * ffn


def _tile_patches(keys: ConfigKeys) -> int:
    return (_side(keys, "image_size") // _side(keys, "patch_size")) ** 2


def _side(keys: ConfigKeys, name: str) -> int:
    """Returns the side of a square, which some files have as height and width."""
    value = keys.get(name)
    if isinstance(value, list | tuple) and len(set(value)) == 1:
        return ConfigKeys({name: value[0]}, {}).integer(name)
    return keys.integer(name)


# Values of transformers' classes for keys that a file may lack.
_QWEN = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
_SMALL = {
    "num_channels": 3,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "image_size": 224,
}
_LARGE = {
    "num_channels": 3,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
}
_PIXTRAL = {**_LARGE, "patch_size": 16, "image_size": 1024}
_INTERNVL = {
    **_LARGE,
    "patch_size": 14,
    "image_size": 448,
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
}
_LLAMA4 = {
    "num_channels": 3,
    "hidden_size": 768,
    "intermediate_size": 5632,
    "num_hidden_layers": 34,
    "patch_size": 14,
    "image_size": 448,
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "vision_output_dim": 7680,
}
_GRIDS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
# Towers of LLaVA.
_TOWERS: dict[str, tuple[Callable[[ConfigKeys], int], dict[str, Any]]] = {
    "clip_vision_model": (_clip, {**_SMALL, "patch_size": 32}),
    "pixtral": (_pixtral, _PIXTRAL),
    "siglip_vision_model": (_siglip, {**_SMALL, "patch_size": 16, "vision_use_head": True}),
}
_Reader = Callable[[ConfigKeys, Mapping[str, Any]], VisionShape]
_FAMILIES: dict[str, tuple[_Reader, dict[str, Any]]] = {
    "glm4v": (_glm4v, _QWEN | {"image_size": 336}),
    "internvl": (_internvl, _INTERNVL),
    "llama4": (_llama4, _LLAMA4),
    "llava": (_llava, {}),
    "llava_next": (_llava_next, {}),
    "mistral3": (_mistral3, _PIXTRAL),
    "qwen2_5_vl": (_qwen2_5, _QWEN),
    "qwen2_vl": (_qwen2, _QWEN),
    "qwen3_5": (_qwen3, _QWEN),
    "qwen3_5_moe": (_qwen3, _QWEN),
    "qwen3_vl": (_qwen3, _QWEN),
    "qwen3_vl_moe": (_qwen3, _QWEN),
}
