"""Shape of a user's model from its config.json. The weights are not needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prism.errors import ConfigError
from prism.models.files import DTYPE_BYTES, config_file, decoder_of, read_config
from prism_sim.costs.shapes import ModelShape


def name_of(path: Path) -> str:
    """Returns the model's name: that of its folder, or of a file that is not named config.json."""
    file = config_file(path)
    return file.parent.name if file.name == "config.json" else file.stem


def read_shape(path: Path) -> ModelShape:
    """Reads the shape from a folder with a config.json, or from such a file with any name that ends
    in .json. Windows count as full attention, as engines without pools for windows keep them.

    Raises ConfigError for a missing file, a missing key or invalid value, a family that is not
    known, a quantization other than fp8, and models whose layers keep anything but the same KV of
    each token.
    """
    key = f"model {path}"
    config = read_config(path, key)
    decoder = decoder_of(config, path, key)
    kept = {(layer.kv, layer.state, layer.index_bytes) for layer in decoder.layers}
    if kept != {(decoder.layers[0].kv, None, 0)} or decoder.layers[0].kv is None:
        raise ConfigError(
            f"{key}: layers of {decoder.model_type} do not all keep the same KV and nothing else,"
            " which the simulator does not model; give another model"
        )
    dtype_bytes = DTYPE_BYTES.get(decoder.dtype, 2)
    eight_bit = _is_fp8(config, path, key)
    return ModelShape(name_of(path), decoder, 1 if eight_bit else dtype_bytes, dtype_bytes)


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
