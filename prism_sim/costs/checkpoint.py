"""Shape of a user's model from its config.json. The weights are not needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism.config.checks.adapters import adapter_named
from prism.config.schema.cluster_config import EngineConfig
from prism.errors import ConfigError
from prism.models.files import DTYPE_BYTES, config_file, decoder_of, read_config
from prism_sim.costs.shapes import ModelShape

if TYPE_CHECKING:
    from kvcached.models import ModelShape as Decoder


def name_of(path: Path) -> str:
    """Returns the model's name: that of its folder, or of a file that is not named config.json."""
    file = config_file(path)
    return file.parent.name if file.name == "config.json" else file.stem


def read_shape(path: Path) -> ModelShape:
    """Reads the shape from a folder with a config.json, or from such a file with any name that ends
    in .json. Layers with windows have a separate pool in the families for which the default engine
    has one, and keep all tokens in others.

    Raises ConfigError for a missing file, a missing key or invalid value, a family that is not
    known, a quantization other than fp8, and models that keep an index of keys, several sizes of
    windows in a separate pool, or no KV at all.
    """
    key = f"model {path}"
    config = read_config(path, key)
    decoder = decoder_of(config, path, key)
    dtype_bytes = DTYPE_BYTES.get(decoder.dtype, 2)
    weight_bytes = 1 if _is_fp8(config, path, key) else dtype_bytes
    apart = _windows_apart(decoder)
    shape = ModelShape(name_of(path), decoder, weight_bytes, dtype_bytes, dtype_bytes, apart)
    if problem := _unknown_kv(shape):
        raise ConfigError(
            f"{key}: {decoder.model_type} {problem}, which the simulator does not model; give"
            " another model"
        )
    return shape


def _windows_apart(decoder: Decoder) -> bool:
    """Returns whether layers with windows, next to others, have a separate pool."""
    if len({bool(layer.window_tokens) for layer in decoder.layers}) == 1:
        return False
    pools: frozenset[str] = adapter_named(EngineConfig().adapter).traits().window_pools
    return decoder.model_type in pools


def _unknown_kv(shape: ModelShape) -> str:
    """Returns what the simulator does not model of a shape's KV, "" if it models all."""
    layers = shape.decoder.layers
    windows = {layer.window_tokens for layer in layers} - {None}
    if any(layer.index_bytes for layer in layers):
        return "keeps an index of keys (sparse attention)"
    if shape.windows_apart and len(windows) > 1:
        return "has windows of several sizes"
    return "" if shape.main_layers else "does not have a layer that keeps KV of all tokens"


def _is_fp8(config: dict[str, Any], path: Path, key: str) -> bool:
    """Returns whether the weights are in FP8. Raises ConfigError for other quantizations."""
    given = config.get("quantization_config")
    if given is not None and not isinstance(given, dict):
        raise ConfigError(
            f"{key}: {config_file(path)} has quantization_config {json.dumps(given):.60}, which is"
            " not an object; correct the file"
        )
    method = (given or {}).get("quant_method")
    if method not in (None, "fp8"):
        raise ConfigError(
            f"{key}: quantization_config: {method!r} does not have a roofline, only fp8 does"
        )
    return method == "fp8"
