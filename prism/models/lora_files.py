"""Reader of a LoRA adapter's files (PEFT's format), and check whether a model can serve it; without
torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from prism.errors import ConfigError
from prism.models.files import ModelFiles, read_config
from prism.models.text_part import has_parts, text_config

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_TENSOR = re.compile(r"\.layers\.(\d+)\.[\w.]*?(\w+)\.lora_(A|B)\.weight$")
_VISION = re.compile(r"\.(vision_tower|vision_model|visual)\.")
# Groups of modules that engines fuse into one matrix.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Settings of adapters that engines do not support, with the values that disable them.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "fan_in_fan_out": (None, False),
    "trainable_token_indices": (None, [], {}),
}


@dataclass(frozen=True, slots=True)
class LoraBase:
    """Sizes of an adapter's base model."""

    layers: int
    hidden: int
    heads: int  # width of all heads' queries
    kv_heads: int  # width of all heads' keys
    inner: int  # width of the MLP; 0 with experts

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the modules that adapters may change."""
        shapes = {
            "q_proj": (self.hidden, self.heads),
            "k_proj": (self.hidden, self.kv_heads),
            "v_proj": (self.hidden, self.kv_heads),
            "o_proj": (self.heads, self.hidden),
        }
        if self.inner:
            shapes |= {
                "gate_proj": (self.hidden, self.inner),
                "up_proj": (self.hidden, self.inner),
                "down_proj": (self.inner, self.hidden),
            }
        return shapes


def inspect_adapter(path: Path, where: str, base: LoraBase, rank_max: int) -> tuple[int, set[str]]:
    """Returns an adapter's rank and the modules that it changes. Raises ConfigError that names
    `where` (the YAML key of the path), what is wrong and what to change."""
    rank = _rank(_config(path, where), path, where, rank_max)
    return rank, _targets(base, path, where, rank)


def with_fused(modules: Set[str]) -> set[str]:
    """Returns the modules and those that engines fuse with them, which also take memory."""
    return {name for group in FUSED if {*group} & modules for name in group} | {*modules}


def module_of(
    name: str, shape: Sequence[int], rank: int, layers: int, shapes: Mapping[str, tuple[int, int]]
) -> str:
    """Returns the module that an adapter's tensor changes. Raises ValueError with the reason if the
    tensor fits no module of the model.

    Args:
        shapes: (inputs, outputs) of the modules.
    """
    match = _TENSOR.search(name)
    if match is None or match[2] not in shapes or _VISION.search(name):
        raise ValueError(
            f"it changes {name}; adapters may change the projections of attention and of a dense"
            " MLP alone; merge it into its model, and serve that"
        )
    inputs, outputs = shapes[match[2]]
    expected = [rank, inputs] if match[3] == "A" else [outputs, rank]
    if list(shape) != expected or int(match[1]) >= layers:
        raise ValueError(
            f"it was made for another model: {name} has shape {list(shape)}, but this model of"
            f" {layers} layers needs {expected}; correct the path"
        )
    return match[2]


def lora_base(model: Path, files: ModelFiles, key: str, *, images: bool = False) -> LoraBase:
    """Returns the sizes of the model in folder `model`. `images`: it is served with its vision
    tower. Raises ConfigError for models of which adapters are not served."""
    if files.pools.latent_rope_dim is not None:
        raise ConfigError(
            f"{key}: adapters of models with latent attention are not served; merge the adapter"
            " into its model, and serve that"
        )
    if any(each.state for each in files.decoder.layers):
        raise ConfigError(
            f"{key}: adapters of models that keep a state per sequence are not served; merge the"
            " adapter into its model, and serve that"
        )
    whole = read_config(model, key)
    if has_parts(whole) and not images:
        raise ConfigError(
            f"{key}: adapters of models that take images or audio are not served for this family,"
            " or without images; merge the adapter into its model, and serve that"
        )
    config = text_config(whole)
    layer = files.decoder.layers[0]
    inner = config.get("intermediate_size") or config.get("n_inner")
    has_experts = any(each.parameters > each.active_parameters for each in files.decoder.layers)
    return LoraBase(
        layers=files.num_layers,
        hidden=files.decoder.hidden_size,
        heads=layer.heads * files.pools.head_dim,
        kv_heads=files.pools.num_kv_heads * files.pools.head_dim,
        inner=0 if has_experts or not isinstance(inner, int) else inner,
    )


def _config(path: Path, where: str) -> dict[str, Any]:
    file = path / CONFIG
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise ConfigError(
            f"{where}: cannot read {file}: {why}; give the folder of an adapter in PEFT's format"
        ) from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if str(kind).upper() != "LORA":
        raise ConfigError(f"{where}: {file} has peft_type {kind!r}; only LoRA adapters are served")
    for name, neutral in _NEUTRAL.items():
        if config.get(name) not in neutral:
            shown = json.dumps(config[name])
            raise ConfigError(
                f"{where}: {file} has {name} {shown:.60}, which engines do not compute; merge the"
                " adapter into its model, and serve that"
            )
    return config


def _rank(config: dict[str, Any], path: Path, where: str, rank_max: int) -> int:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise ConfigError(f"{where}: {path / CONFIG} lacks r or lora_alpha; complete the file")
    if rank > rank_max:
        raise ConfigError(
            f"{where}: its rank of {rank} is above engine.lora.rank_max; raise that, which"
            " takes memory for each slot"
        )
    return rank


def _targets(base: LoraBase, path: Path, where: str, rank: int) -> set[str]:
    """Checks name and shape of each tensor. Returns the modules that they change."""
    found = list(_tensors(path / WEIGHTS, where))
    if not found:
        raise ConfigError(f"{where}: {path / WEIGHTS} is empty; save the adapter again")
    try:
        return {module_of(*tensor, rank, base.layers, base.shapes) for tensor in found}
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _tensors(file: Path, where: str) -> Iterator[tuple[str, list[int]]]:
    try:
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                yield name, tensors.get_slice(name).get_shape()
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{where}: cannot read {file}: {error}; save the adapter in safetensors"
        ) from error
