"""Reader of a model's config.json and of the headers of its weights, without torch."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism.errors import ConfigError
from prism.models.config_values import wrong_values
from prism.models.kv_scheme import kv_scheme_of
from prism.models.text_part import has_parts, text_weight

if TYPE_CHECKING:
    from kvcached import Checkpoint, CheckpointTensor
    from kvcached.models import LayerShape, ModelShape

_Stamp = tuple[str, int, int, int]
_OF_WEIGHTS = re.compile(r"\.(safetensors|gguf)")

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPE_BYTES = DTYPE_BYTES | {"float8_e4m3fn": 1, "float8_e5m2": 1}
# Valid dtypes in a config.json that do not determine the dtype in an engine.
_OPEN_DTYPES = ("auto", "float64", "float8_e4m3fn", "float8_e5m2")

# Buffers that some checkpoints have and no engine loads: masks of GPT-2 and Pythia, rotary tables,
# numbers for the format of bitsandbytes' matrices.
_BUFFERS = re.compile(
    r"(\.(attn|attention)\.(bias|masked_bias)|rotary_emb\.inv_freq|\.weight_format)$"
)
_TEXT_MODEL = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")
# Keys of a config.json, at any depth, whose presence means quantized weights.
_QUANTIZED = ("quantization_config", "compression_config")
BITSANDBYTES = "bitsandbytes"  # method of quantized weights
# File of NVIDIA's ModelOpt in the place of these keys.
_MODELOPT = "hf_quant_config.json"


@dataclass(frozen=True, slots=True)
class Pools:
    """Layers of a model by the pool of their KV."""

    # As in ModelSpec.
    kv_layers: int
    num_kv_heads: int
    head_dim: int
    latent_rope_dim: int | None
    window_layers: int = 0
    window_tokens: int = 0
    window_kv_heads: int = 0
    window_head_dim: int = 0


@dataclass(frozen=True, slots=True)
class Weights:
    """Sizes of tensors in files."""

    parameters: int
    # Bytes by dtype.
    stored_bytes: Mapping[str, int]

    @classmethod
    def of(cls, tensors: Iterable[CheckpointTensor]) -> Weights:
        """Returns the sizes of `tensors`."""
        parameters, stored = 0, Counter[str]()
        for tensor in tensors:
            parameters += prod(tensor.spec.shape)
            stored[tensor.spec.dtype] += tensor.spec.size_bytes
        return cls(parameters, stored)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Geometry and weights of a checkpoint."""

    architecture: str
    # Dtype in config.json, by default float32.
    stored_dtype: str
    # At most the window, if engines compute full attention in layers that have one.
    context_length: int
    num_layers: int
    pools: Pools
    # Method of quantized weights, "" for others.
    quantization: str
    # Scheme of quantized KV: FP8, "" for plain KV, or what describes another one.
    kv_scheme: str
    weights: Weights
    # Part of the weights that each of several devices has.
    whole: Weights
    decoder: ModelShape

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.weights.parameters

    def shape(
        self, dtype: str, context_length: int | None, kv_dtype: str | None = None
    ) -> dict[str, Any]:
        """Returns fields of a ModelSpec for the model in `dtype` with a KV cache in `kv_dtype`
        (None: the same). `context_length` is capped at the one in the files."""
        kv_dtype = kv_dtype or dtype
        return {
            "architecture": self.architecture,
            "dtype": dtype,
            "kv_dtype": kv_dtype,
            "context_length": min(context_length or self.context_length, self.context_length),
            "num_layers": self.num_layers,
            **asdict(self.pools),
            "state_bytes": self.decoder.state_bytes(DTYPE_BYTES[dtype]),
            "whole_state_bytes": self.decoder.whole_state_bytes(DTYPE_BYTES[dtype]),
            "state_layers": sum(layer.state is not None for layer in self.decoder.layers),
            "divided": self.decoder.divided,
            "weight_bytes": self.weight_bytes(dtype),
            "whole_weight_bytes": self._loaded_bytes(self.whole, dtype)
            + self._bytes_of(self.decoder.whole_channel_parameters, dtype),
            "kv_head_weight_bytes": self._bytes_of(self.decoder.kv_head_parameters, dtype),
            "derived_bytes": self.derived_bytes(dtype),
            "token_bytes": self.token_bytes(kv_dtype),
        }

    def weight_bytes(self, dtype: str) -> int:
        """Returns the bytes of the weights in an engine, with those that it derives. Quantized ones
        stay as they are stored; the others of half precision are loaded in `dtype`."""
        return self._loaded_bytes(self.weights, dtype) + self.derived_bytes(dtype)

    def _loaded_bytes(self, weights: Weights, dtype: str) -> int:
        if not self.quantization:
            return weights.parameters * DTYPE_BYTES[dtype]
        scale = dict.fromkeys(("bfloat16", "float16"), DTYPE_BYTES[dtype] / 2)
        stored = weights.stored_bytes.items()
        return sum(int(size * scale.get(name, 1)) for name, size in stored)

    def _bytes_of(self, parameters: int, dtype: str) -> int:
        """Returns the bytes of some of the model's parameters, by the mean of all."""
        loaded_bytes = self._loaded_bytes(self.weights, dtype)
        return loaded_bytes * parameters // self.decoder.parameters

    def token_bytes(self, dtype: str) -> int:
        """Returns the bytes of one token's KV in the main pool, in the KV cache's `dtype`."""
        pools, parts = self.pools, 1 if self.pools.latent_rope_dim else 2
        numbers = pools.kv_layers * parts * pools.num_kv_heads * pools.head_dim
        return numbers * KV_DTYPE_BYTES[dtype]

    def derived_bytes(self, dtype: str) -> int:
        """Returns the bytes of copies of weights that engines make to attend to latents."""
        return sum(layer.absorbed for layer in self.decoder.layers) * DTYPE_BYTES[dtype]


def inspect_model(
    path: Path,
    key: str,
    window_pools: Container[str] = (),
    windows: Container[str] | None = None,
    whole_weights: str = "^$",
    *,
    images: bool = False,
) -> ModelFiles:
    """Reads the checkpoint in directory `path`. `window_pools`, `windows`, `whole_weights`: see
    EngineTraits. `images`: the whole model is loaded, not its language model alone. Raises
    ConfigError that names `key` (the YAML key of the path), the file, and what to change."""
    if not path.is_dir():
        raise ConfigError(f"{key}: {path} is not a directory; correct the path")
    config = read_config(path, key)
    architecture = _architecture(config, path, key)
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(
            f"{key}: {path} does not have tokenizer.json; save the fast tokenizer there"
        )
    decoder = decoder_of(config, path, key)
    for values, name, expected in wrong_values(config, decoder):
        raise _mistake(values, name, expected, path, key)
    sizes = [layer.window_tokens for layer in decoder.layers if layer.window_tokens]
    everywhere = len(sizes) == len(decoder.layers)
    ignored = windows is not None and decoder.model_type not in windows
    split = decoder.model_type in window_pools and not everywhere
    pools = _pools(decoder, f"{key}: {path}/config.json: {architecture}", split=split)
    tensors = _weights(path, decoder.tied, key, in_part=has_parts(config) and not images)
    method, described = _quantization(config, path)
    return ModelFiles(
        architecture=architecture,
        stored_dtype=named_dtype(config, path, key) or "float32",
        context_length=min([decoder.context_tokens, *(sizes if ignored else ())]),
        num_layers=len(decoder.layers),
        pools=pools,
        quantization=method,
        kv_scheme=kv_scheme_of(method, described, tensors),
        weights=Weights.of(tensors.values()),
        whole=Weights.of(
            tensor
            for name, tensor in tensors.items()
            if (images and has_parts(config) and text_weight(name) is None)
            or re.search(whole_weights, f"{decoder.model_type}:{name}")
        ),
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
    except (OSError, ValueError, RecursionError) as error:
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


def _pools(decoder: ModelShape, model: str, *, split: bool) -> Pools:
    """Returns the layers by pool; with `split`, those with a sliding window have a separate one.
    Raises ConfigError if layers of a pool differ or keep more."""
    layers = [layer for layer in decoder.layers if layer.kv]
    windows = [layer for layer in layers if split and layer.window_tokens]
    full = [layer for layer in layers if not (split and layer.window_tokens)]
    kept = {layer.kv for layer in full}
    window = {(layer.kv, layer.window_tokens) for layer in windows}
    problem = ""
    if not kept:
        problem = "has a sliding window or a state in every layer"
    elif len(kept) > 1 or len(window) > 1:
        problem = "has layers with different numbers of K and V heads"
    elif any(layer.index_bytes for layer in layers):
        problem = "keeps an index of keys (sparse attention)"
    if problem:
        raise ConfigError(
            f"{model} {problem}, which this version cannot serve; give a model whose layers all"
            " keep the same KV"
        )
    [kv] = kept
    parts = kv.parts(0) if kv else ()
    return Pools(
        kv_layers=len(full),
        num_kv_heads=parts[0].heads,
        head_dim=parts[0].dim,
        latent_rope_dim=getattr(kv, "rope_dim", None),
        **_window(windows),
    )


def _window(layers: Sequence[LayerShape]) -> dict[str, int]:
    """Returns the fields of Pools for layers that all keep the same of a window."""
    if not layers:
        return {}
    kv, tokens = layers[0].kv, layers[0].window_tokens
    assert kv is not None
    assert tokens is not None
    [k, *_] = kv.parts(0)
    return {
        "window_layers": len(layers),
        "window_tokens": tokens,
        "window_kv_heads": k.heads,
        "window_head_dim": k.dim,
    }


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


def quantized_by(config: Mapping[str, Any], path: Path) -> str:
    """Returns the method of quantized weights, or the key that describes them if the method has no
    name. Returns "" for other weights."""
    return _quantization(config, path)[0]


def _quantization(config: Mapping[str, Any], path: Path) -> tuple[str, Mapping[str, Any]]:
    """Returns the method (see `quantized_by`), and the values that describe it."""
    from prism.models.gguf.gguf_weights import GGUF, has_gguf

    if has_gguf(path):
        return GGUF, {}
    method, described = next(_methods(config), ("", dict[str, Any]()))
    file = path / _MODELOPT
    if not file.is_file():
        return method, described
    try:
        section = json.loads(file.read_text()).get("quantization")
    except (OSError, ValueError, AttributeError, RecursionError):
        section = None
    return method or "modelopt", section if isinstance(section, dict) else described


def _methods(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, value in config.items():
        if name in _QUANTIZED and value is not None:
            described = value if isinstance(value, Mapping) else {}
            yield str(described.get("quant_method") or name), described
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Mapping):
                yield from _methods(part)


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


def checkpoint_of(folder: Path) -> Checkpoint:
    """Returns the checkpoint in a folder, which is read again only if its files have changed, or
    after `forget_headers`. Raises the errors of `Checkpoint.open`."""
    files = (file for file in sorted(folder.iterdir()) if _OF_WEIGHTS.search(file.name))
    return _read(folder, tuple(map(_stamp, files)))


def forget_headers() -> None:
    """Frees the headers of checkpoints: those of a large model take 100 MB."""
    _read.cache_clear()


def _stamp(file: Path) -> _Stamp:
    """Returns what changes when the file does. `Checkpoint.open` reports a file that is missing."""
    try:
        stat = file.stat()
    except OSError:
        return (file.name, 0, 0, 0)
    return (file.name, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@cache
def _read(folder: Path, _files: tuple[_Stamp, ...]) -> Checkpoint:
    from kvcached import Checkpoint

    return Checkpoint.open(folder)


def _weights(path: Path, tied: bool, key: str, *, in_part: bool) -> dict[str, CheckpointTensor]:
    """Returns the tensors that an engine allocates, by name. Of those of a model with other parts,
    with `in_part`, they are the language model's. With tied embeddings lm_head shares the
    embedding's memory, even if the file stores it again."""
    from kvcached.errors import WeightFileError
    from prism.models.gguf.gguf_weights import has_gguf, kept

    try:
        tensors = checkpoint_of(path).tensors
    except WeightFileError as error:
        raise ConfigError(f"{key}: {error}") from error
    if has_gguf(path):
        return {tensor.name: tensor for tensor in kept(tensors)}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not in_part or text_weight(name) is not None
        if not _BUFFERS.search(name) and not (tied and name.endswith("lm_head.weight"))
    }
