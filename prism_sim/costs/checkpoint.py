"""Shape of a user's model from its config.json. The weights are not needed."""

from __future__ import annotations

from pathlib import Path

from prism.errors import ConfigError
from prism.models.files import (
    DTYPE_BYTES,
    Lookup,
    config_file,
    named_dtype,
    read_config,
    text_part,
    with_defaults,
)
from prism_sim.costs.shapes import ModelShape

PLAIN_FFN = {"opt", "gpt2", "gpt_neox", "gptj", "phi", "falcon", "bloom"}
"""Values of model_type for architectures without gated MLPs."""
TIED = {"opt", "gpt2", "bloom", "falcon"}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def name_of(path: Path) -> str:
    """Returns the model's name: that of its folder, or of a file that is not named config.json."""
    file = config_file(path)
    return file.parent.name if file.name == "config.json" else file.stem


def read_shape(path: Path) -> ModelShape:
    """Reads the shape from a folder with a config.json, or from such a file with any name that ends
    in .json.

    Raises ConfigError for a missing file, a missing key or invalid value, a quantization other than
    fp8, and a mixture of experts, whose step times depend on more than the shape.
    """
    key = f"model {path}"
    config = read_config(path, key)
    text = with_defaults(text_part(config, path, key))
    found = Lookup(text, path, key)
    if any(text.get(name) for name in EXPERTS):
        raise ConfigError(f"{key}: mixtures of experts do not have a roofline; calibrate the model")
    quantized = config.get("quantization_config") or {"quant_method": None}
    if not isinstance(quantized, dict):
        raise Lookup(config, path, key).mistake("quantization_config", "an object")
    method = quantized.get("quant_method")
    if method not in (None, "fp8"):
        raise ConfigError(
            f"{key}: quantization_config: {method!r} does not have a roofline, only fp8 does"
        )
    kind = str(text.get("model_type"))
    hidden = found.integer("hidden_size", "n_embd")
    heads = found.integer("num_attention_heads", "n_head")
    dtype_bytes = DTYPE_BYTES[named_dtype(config, path, key) or "bfloat16"]
    return ModelShape(
        name=name_of(path),
        layers=found.integer("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=found.integer("num_key_value_heads", default=heads),
        head_dim=found.head_dim(),
        ffn=found.integer("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
        vocab=found.integer("vocab_size"),
        tied=bool(found.flag("tie_word_embeddings", kind in TIED)),
        ffn_matrices=2 if kind in PLAIN_FFN else 3,
        positions=found.integer("n_positions", "max_position_embeddings")
        if kind in {"opt", "gpt2"}
        else 0,
        weight_dtype_bytes=1 if method == "fp8" else dtype_bytes,
        kv_dtype_bytes=dtype_bytes,
    )
