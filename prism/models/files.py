"""Reader of a model's config.json and of the headers of its safetensors, without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from prism.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Valid dtypes in a config.json that do not determine the dtype in an engine.
_OPEN_DTYPES = ("auto", "float64", "float8_e4m3fn", "float8_e5m2")

# Buffers that some checkpoints have and no engine loads: GPT-2's masks, rotary tables.
_BUFFERS = re.compile(r"(\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
_TEXT_MODEL = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")

# Defaults of architectures, which a config.json may omit.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024},
    "llama": {"max_position_embeddings": 2048},
    "qwen3": {"max_position_embeddings": 32768, "head_dim": 128},
    "gemma3_text": {
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Geometry and parameter count of a checkpoint."""

    architecture: str
    # Dtype in config.json, by default float32.
    stored_dtype: str
    context_length: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    parameters: int

    def shape(self, dtype: str, context_length: int | None) -> dict[str, Any]:
        """Returns fields of a ModelSpec for the model in `dtype`. `context_length` is capped at the
        one in the files."""
        return {
            "architecture": self.architecture,
            "dtype": dtype,
            "kv_dtype": dtype,
            "context_length": min(context_length or self.context_length, self.context_length),
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "weight_bytes": self.weight_bytes(dtype),
            "token_bytes": self.token_bytes(dtype),
        }

    def weight_bytes(self, dtype: str) -> int:
        return self.parameters * DTYPE_BYTES[dtype]

    def token_bytes(self, dtype: str) -> int:
        """Returns the bytes of one token's KV over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


def inspect_model(path: Path, key: str) -> ModelFiles:
    """Reads the checkpoint in directory `path`. Raises ConfigError that names `key` (the YAML key
    of the path), the file, and what to change."""
    if not path.is_dir():
        raise ConfigError(f"{key}: {path} is not a directory; correct the path")
    config = read_config(path, key)
    architecture = _architecture(config, path, key)
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(
            f"{key}: {path} does not have tokenizer.json; save the fast tokenizer there"
        )
    text = text_part(config, path, key)
    lookup = Lookup(with_defaults(text), path, key)
    heads = lookup.integer("num_attention_heads", "n_head")
    return ModelFiles(
        architecture=architecture,
        stored_dtype=named_dtype(config, path, key) or "float32",
        context_length=lookup.integer("max_position_embeddings", "n_positions", "n_ctx"),
        num_layers=lookup.integer("num_hidden_layers", "n_layer"),
        num_kv_heads=lookup.integer("num_key_value_heads", default=heads),
        head_dim=lookup.head_dim(),
        parameters=_count_parameters(path, lookup.flag("tie_word_embeddings"), key),
    )


@dataclass(frozen=True, slots=True)
class Lookup:
    """Values of a config.json. Absent and null values have defaults; others must have the right
    type. Methods raise ConfigError that names the file and the key."""

    values: dict[str, Any]
    path: Path
    key: str

    def integer(self, *names: str, default: int | None = None) -> int:
        """Returns the value of the first of these keys that is present."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise self.mistake(name, "a whole number of at least 1")
            return value
        if default is not None:
            return default
        raise ConfigError(
            f"{self.key}: {config_file(self.path)} lacks a positive {names[0]}; complete the file"
        )

    def flag(self, name: str, default: bool | None = None) -> bool | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.mistake(name, "true or false")
        return default if value is None else value

    def head_dim(self) -> int:
        """Returns the head dimension, by default the hidden size divided by the heads."""
        if self.values.get("head_dim") is not None:
            return self.integer("head_dim")
        hidden = self.integer("hidden_size", "n_embd")
        heads = self.integer("num_attention_heads", "n_head")
        if hidden < heads:
            raise ConfigError(
                f"{self.key}: {config_file(self.path)} has hidden_size {hidden} for {heads} heads;"
                " correct one of them"
            )
        return hidden // heads

    def mistake(self, name: str, expected: str) -> ConfigError:
        shown = json.dumps(self.values[name])
        return ConfigError(
            f"{self.key}: {config_file(self.path)} has {name} {shown:.60}, which is not"
            f" {expected}; correct the file"
        )


def config_file(path: Path) -> Path:
    """Returns the config.json of a folder, or `path` itself if its name ends in .json."""
    return path if path.suffix == ".json" else path / "config.json"


def text_part(config: dict[str, Any], path: Path, key: str) -> dict[str, Any]:
    """Returns the text model's part of a config.json. Raises ConfigError."""
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise Lookup(config, path, key).mistake("text_config", "an object")
    return text


def with_defaults(text: dict[str, Any]) -> dict[str, Any]:
    """Returns the text model's part of a config.json with the defaults of its architecture."""
    return {**_DEFAULTS.get(str(text.get("model_type")), {}), **text}


def read_config(path: Path, key: str) -> dict[str, Any]:
    file = config_file(path)
    if not file.is_file():
        problem = "does not exist" if file == path else "does not have config.json"
        raise ConfigError(
            f"{key}: {path} {problem}; give a directory in Hugging Face's layout"
            " (config.json, tokenizer.json, *.safetensors)"
        )
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: cannot read {file}: {error}; repair the file") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{key}: {file} is not a JSON object; repair the file")
    return config


def _architecture(config: dict[str, Any], path: Path, key: str) -> str:
    names = config.get("architectures") or [""]
    if not isinstance(names, list):
        raise Lookup(config, path, key).mistake("architectures", "a list")
    architecture = str(names[0])
    if not _TEXT_MODEL.search(architecture):
        raise ConfigError(
            f"{key}: {path}/config.json names architecture {architecture or 'none'!r}, which does"
            " not generate text; give a causal language model"
        )
    if "quantization_config" in config:
        raise ConfigError(
            f"{key}: {path} holds quantized weights, which this version cannot serve; give an"
            " unquantized checkpoint"
        )
    if config.get("kv_lora_rank"):
        raise ConfigError(
            f"{key}: {architecture} uses latent attention (MLA), which this version cannot serve;"
            " give a model with K and V heads"
        )
    return architecture


def named_dtype(config: dict[str, Any], path: Path, key: str) -> str | None:
    """Returns the dtype in a config.json, first of the text model, that is in DTYPE_BYTES. Returns
    None if it names none or an open one. Raises ConfigError for an unknown dtype."""
    for part in (text_part(config, path, key), config):
        for name in ("dtype", "torch_dtype"):
            value = part.get(name)
            if not value:
                continue
            if value in (*DTYPE_BYTES, *_OPEN_DTYPES):
                return value if value in DTYPE_BYTES else None
            raise Lookup(part, path, key).mistake(name, f"one of {', '.join(DTYPE_BYTES)}")
    return None


def _count_parameters(path: Path, tied: bool | None, key: str) -> int:
    """Returns the number of parameters that an engine allocates. With tied embeddings lm_head
    shares the embedding's memory, even if the file stores it again. Without the setting, embeddings
    are tied if the file has no lm_head."""
    sizes = dict(_tensor_sizes(path, key))
    return sum(
        size
        for name, size in sizes.items()
        if not _BUFFERS.search(name) and not (tied and name.endswith("lm_head.weight"))
    )


def _tensor_sizes(path: Path, key: str) -> Iterator[tuple[str, int]]:
    for file in _weight_files(path, key):
        try:
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                    yield name, prod(tensors.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{key}: cannot read {file}: {error}; download or convert it again"
            ) from error


def _weight_files(path: Path, key: str) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{key}: cannot read {index}: {error}; download it again") from error
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{key}: {path} does not have *.safetensors; save the weights in that format"
            " (save_pretrained does)"
        )
    return files
