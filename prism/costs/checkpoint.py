"""The shape of a model that a user has: from its config.json, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prism.costs.shapes import ModelShape
from prism.errors import ConfigError
from prism.models.files import DTYPE_BYTES, Lookup, read_config

PLAIN_FFN = {"opt", "gpt2", "gpt_neox", "gptj", "phi", "falcon", "bloom"}
"""model_type of architectures without gated MLPs."""
TIED = {"opt", "gpt2", "bloom", "falcon"}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_shape(path: Path) -> ModelShape:
    """Named after the folder. Raises ConfigError: no config.json, a key that it lacks, or a mixture
    of experts, whose steps depend on more than shapes."""
    key = f"model {path}"
    config = read_config(path, key)
    text: dict[str, Any] = config.get("text_config") or config
    if any(text.get(name) for name in EXPERTS):
        raise ConfigError(f"{key}: a mixture of experts has no roofline here; calibrate it")
    kind = str(text.get("model_type"))
    found = Lookup(text, path, key)
    hidden = found.integer("hidden_size", "n_embd")
    heads = found.integer("num_attention_heads", "n_head")
    dtype_bytes = DTYPE_BYTES.get(str(text.get("dtype") or text.get("torch_dtype")), 2)
    return ModelShape(
        name=path.name,
        layers=found.integer("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=found.integer("num_key_value_heads", default=heads),
        head_dim=found.integer("head_dim", default=hidden // heads),
        ffn=found.integer("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
        vocab=found.integer("vocab_size"),
        tied=bool(text.get("tie_word_embeddings", kind in TIED)),
        ffn_matrices=2 if kind in PLAIN_FFN else 3,
        positions=found.integer("n_positions", "max_position_embeddings")
        if kind in {"opt", "gpt2"}
        else 0,
        weight_dtype_bytes=dtype_bytes,
        kv_dtype_bytes=dtype_bytes,
    )
