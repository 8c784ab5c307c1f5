"""Reader of a model's config.json and of the headers of its safetensors, without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism.errors import ConfigError

if TYPE_CHECKING:
    from kvcached import Heads, Latent
    from kvcached.models import ModelShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Valid dtypes in a config.json that do not determine the dtype in an engine.
_OPEN_DTYPES = ("auto", "float64", "float8_e4m3fn", "float8_e5m2")

# Buffers that some checkpoints have and no engine loads: masks of GPT-2 and Pythia, rotary tables.
_BUFFERS = re.compile(r"(\.(attn|attention)\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
_TEXT_MODEL = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")
# Keys of a config.json, at any depth, whose presence means quantized weights.
_QUANTIZED = ("quantization_config", "compression_config")
# File of NVIDIA's ModelOpt in the place of these keys.
_MODELOPT = "hf_quant_config.json"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Geometry and parameter count of a checkpoint."""

    architecture: str
    # Dtype in config.json, by default float32.
    stored_dtype: str
    # At most the window, if every layer has one: engines compute full attention.
    context_length: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    # As in ModelSpec.
    latent_rope_dim: int | None
    parameters: int
    decoder: ModelShape

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
            "latent_rope_dim": self.latent_rope_dim,
            "weight_bytes": self.weight_bytes(dtype),
            "derived_bytes": self.derived_bytes(dtype),
            "token_bytes": self.token_bytes(dtype),
        }

    def weight_bytes(self, dtype: str) -> int:
        return self.parameters * DTYPE_BYTES[dtype]

    def derived_bytes(self, dtype: str) -> int:
        """Returns the bytes of copies of weights that engines make to attend to latents."""
        return sum(layer.absorbed for layer in self.decoder.layers) * DTYPE_BYTES[dtype]

    def token_bytes(self, dtype: str) -> int:
        """Returns the bytes of one token's KV over all layers."""
        return self.decoder.kv_token_bytes(DTYPE_BYTES[dtype])


def inspect_model(path: Path, key: str) -> ModelFiles:
    """Reads the checkpoint in directory `path`. Raises ConfigError that names `key` (the YAML key
    of the path), the file, and what to change."""
    if not path.is_dir():
        raise ConfigError(f"{key}: {path} is not a directory; correct the path")
    config = read_config(path, key)
    architecture = _architecture(config, path, key)
    _check_unquantized(config, path, key)
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(
            f"{key}: {path} does not have tokenizer.json; save the fast tokenizer there"
        )
    decoder = decoder_of(config, path, key)
    kept = _kept(decoder, f"{key}: {path}/config.json: {architecture}")
    [first, *_] = kept.parts(0)
    windows = [layer.window_tokens for layer in decoder.layers if layer.window_tokens]
    everywhere = len(windows) == len(decoder.layers)
    return ModelFiles(
        architecture=architecture,
        stored_dtype=named_dtype(config, path, key) or "float32",
        context_length=min([decoder.context_tokens, *(windows if everywhere else ())]),
        num_layers=len(decoder.layers),
        num_kv_heads=first.heads,
        head_dim=first.dim,
        latent_rope_dim=getattr(kept, "rope_dim", None),
        parameters=_count_parameters(path, decoder.tied, key),
        decoder=decoder,
    )


def config_file(path: Path) -> Path:
    """Returns the config.json of a folder, or `path` itself if its name ends in .json."""
    return path if path.suffix == ".json" else path / "config.json"


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


def decoder_of(config: dict[str, Any], path: Path, key: str) -> ModelShape:
    """Returns the shape of the model that a config.json describes. Raises ConfigError."""
    from kvcached.errors import InvalidArgumentError
    from kvcached.models import shape_of_config

    named_dtype(config, path, key)
    try:
        return shape_of_config(config)
    except InvalidArgumentError as error:
        file = str(config_file(path))
        said = str(error)
        shown = said.replace("config.json", file, 1) if "config.json" in said else f"{file}: {said}"
        raise ConfigError(f"{key}: {shown}") from error


def _kept(decoder: ModelShape, model: str) -> Heads | Latent:
    """Returns what every layer keeps of a token. Raises ConfigError if layers differ or keep
    more."""
    kept = {layer.kv for layer in decoder.layers}
    [first, *_] = kept
    problem = ""
    if any(layer.state for layer in decoder.layers):
        problem = "keeps a state per sequence (linear attention, Mamba or a convolution)"
    elif first is None or None in kept:
        problem = "has layers that read the K and V of others"
    elif len(kept) > 1:
        problem = "has layers with different numbers of K and V heads"
    elif any(layer.index_bytes for layer in decoder.layers):
        problem = "keeps an index of keys (sparse attention)"
    if problem or first is None:
        raise ConfigError(
            f"{model} {problem}, which this version cannot serve; give a model whose layers all"
            " keep the same KV"
        )
    return first


def _architecture(config: dict[str, Any], path: Path, key: str) -> str:
    names = config.get("architectures") or [""]
    if not isinstance(names, list):
        raise _mistake(config, "architectures", "a list", path, key)
    architecture = str(names[0])
    if not _TEXT_MODEL.search(architecture):
        raise ConfigError(
            f"{key}: {path}/config.json names architecture {architecture or 'none'!r}, which does"
            " not generate text; give a causal language model"
        )
    return architecture


def _check_unquantized(config: dict[str, Any], path: Path, key: str) -> None:
    named = next(_quantized_keys(config), None)
    if named is None and (path / _MODELOPT).is_file():
        named = _MODELOPT
    if named is not None:
        raise ConfigError(
            f"{key}: {path} holds quantized weights ({named}), which this version cannot serve;"
            " give an unquantized checkpoint"
        )


def _quantized_keys(config: Mapping[str, Any]) -> Iterator[str]:
    for name, value in config.items():
        if name in _QUANTIZED and value is not None:
            yield name
        elif isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in _quantized_keys(value))


def named_dtype(config: dict[str, Any], path: Path, key: str) -> str | None:
    """Returns the dtype in a config.json, first of the text model, that is in DTYPE_BYTES. Returns
    None if it names none or an open one. Raises ConfigError for an unknown dtype."""
    text = config.get("text_config")
    for part in (text if isinstance(text, dict) else {}, config):
        for name in ("dtype", "torch_dtype"):
            value = part.get(name)
            if not value:
                continue
            if value in (*DTYPE_BYTES, *_OPEN_DTYPES):
                return value if value in DTYPE_BYTES else None
            raise _mistake(part, name, f"one of {', '.join(DTYPE_BYTES)}", path, key)
    return None


def _mistake(
    values: Mapping[str, Any], name: str, expected: str, path: Path, key: str
) -> ConfigError:
    shown = json.dumps(values[name])
    return ConfigError(
        f"{key}: {config_file(path)} has {name} {shown:.60}, which is not {expected}; correct the"
        " file"
    )


def _count_parameters(path: Path, tied: bool, key: str) -> int:
    """Returns the number of parameters that an engine allocates. With tied embeddings lm_head
    shares the embedding's memory, even if the file stores it again."""
    from kvcached import Checkpoint
    from kvcached.errors import WeightFileError

    try:
        tensors = Checkpoint.open(path).tensors
    except WeightFileError as error:
        raise ConfigError(f"{key}: {error}") from error
    return sum(
        prod(tensor.spec.shape)
        for name, tensor in tensors.items()
        if not _BUFFERS.search(name) and not (tied and name.endswith("lm_head.weight"))
    )
