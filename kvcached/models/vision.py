"""Shape of the vision tower of a model that takes images, with the projection of its vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcached.checks import checked, instance_of
from kvcached.errors import InvalidArgumentError
from kvcached.models.config_keys import ConfigKeys, shown, wrong
from kvcached.models.parts import linear, mlp


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
    """Numbers that a layer holds at a time for each patch: the residual, its norm, Q, K, V, the
    output of attention, and the MLP's inner ones."""


@checked(config=instance_of(Mapping))
def vision_of_config(config: Mapping[str, Any]) -> VisionShape | None:
    """Returns the shape of the vision tower that a config.json describes, None if it describes none
    of a known family. Raises InvalidArgumentError with the key for missing and wrong values."""
    read = _TOWERS.get(str(config.get("model_type")))
    if read is None:
        return None
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise wrong("vision_config", vision, "an object")
    return read(ConfigKeys(vision, _DEFAULTS), config)


def _pixtral(keys: ConfigKeys, config: Mapping[str, Any]) -> VisionShape:
    """Returns the shape of Mistral 3: gated MLPs, and a projector that merges patches."""
    hidden, ffn = keys.integer("hidden_size"), keys.integer("intermediate_size")
    patch, channels = keys.integer("patch_size"), keys.integer("num_channels")
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise wrong("text_config", text, "an object")
    text_hidden = ConfigKeys(text, {}).integer("hidden_size")
    whole = ConfigKeys(config, {"spatial_merge_size": 2, "multimodal_projector_bias": False})
    merged, bias = whole.integer("spatial_merge_size") ** 2, whole.flag("multimodal_projector_bias")
    if (layers := config.get("vision_feature_layer", -1)) != -1:
        raise InvalidArgumentError(
            f"config.json has vision_feature_layer {shown(layers)}, but only the last layer (-1) is"
            " known; give another model"
        )
    layer = 4 * linear(hidden, hidden) + mlp(hidden, ffn).parameters + 2 * hidden
    projector = hidden + linear(hidden * merged, hidden)
    projector += linear(hidden, text_hidden, bias) + linear(text_hidden, text_hidden, bias)
    tower = patch * patch * channels * hidden + hidden
    tower += keys.layers("num_hidden_layers") * layer
    return VisionShape(tower + projector, patch * patch, merged, 6 * hidden + 3 * ffn)


def _qwen2_5(keys: ConfigKeys, _: Mapping[str, Any]) -> VisionShape:
    """Returns the shape of Qwen2.5-VL: gated MLPs with biases, and norms without."""
    hidden, ffn = keys.integer("hidden_size"), keys.integer("intermediate_size")
    layer = _attention(hidden) + mlp(hidden, ffn, bias=True).parameters + 2 * hidden
    merger = _merger(keys, hidden)
    tower = _patches(keys, hidden) + keys.layers("depth") * layer
    return _qwen(keys, tower + hidden + merger, 6 * hidden + 3 * ffn)


def _qwen3(keys: ConfigKeys, _: Mapping[str, Any]) -> VisionShape:
    """Returns the shape of Qwen3-VL: plain MLPs, embeddings of positions, and mergers of inner
    layers (DeepStack)."""
    hidden, ffn = keys.integer("hidden_size"), keys.integer("intermediate_size")
    layer = _attention(hidden) + mlp(hidden, ffn, gated=False, bias=True).parameters + 4 * hidden
    merged = hidden * keys.integer("spatial_merge_size") ** 2
    merger = _merger(keys, hidden)
    inner = len(keys.integers("deepstack_visual_indexes") or ())
    tower = _patches(keys, hidden) + hidden + keys.layers("depth") * layer
    tower += keys.integer("num_position_embeddings") * hidden
    total = tower + 2 * hidden + merger + inner * (2 * merged + merger)
    return _qwen(keys, total, 6 * hidden + 2 * ffn)


def _qwen(keys: ConfigKeys, parameters: int, patch_numbers: int) -> VisionShape:
    merged = keys.integer("spatial_merge_size") ** 2
    return VisionShape(parameters, keys.integer("patch_size") ** 2, merged, patch_numbers)


def _attention(hidden: int) -> int:
    return linear(hidden, 3 * hidden, bias=True) + linear(hidden, hidden, bias=True)


def _patches(keys: ConfigKeys, hidden: int) -> int:
    """Returns the parameters of the convolution of patches, without a bias."""
    inputs = keys.integer("patch_size") ** 2 * keys.integer("temporal_patch_size")
    return inputs * keys.integer("in_channels") * hidden


def _merger(keys: ConfigKeys, hidden: int) -> int:
    """Returns the parameters of the MLP of merged patches, without a norm."""
    merged = hidden * keys.integer("spatial_merge_size") ** 2
    outputs = keys.integer("out_hidden_size")
    return linear(merged, merged, bias=True) + linear(merged, outputs, bias=True)


# Values of transformers' classes for keys that a file may lack.
_DEFAULTS = {
    "in_channels": 3,
    "num_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_TOWERS: dict[str, Callable[[ConfigKeys, Mapping[str, Any]], VisionShape]] = {
    "mistral3": _pixtral,
    "qwen2_5_vl": _qwen2_5,
    "qwen3_vl": _qwen3,
}
