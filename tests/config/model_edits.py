"""Changes of a tiny model's files and of its YAML, one mistake each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import Model

# Changes a model's folder and its YAML.
Edit = Callable[[Path, dict[str, Any]], object]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Q = "model.layers.1.self_attn.q_proj.weight"
TEMPLATE = "tokenizer_config.json"
GENERATION = "generation_config.json"


def keys(file: str = "config.json", **changed: Any) -> Edit:
    """Changes keys of a JSON file of the model; `...` removes one."""

    def edit(model: Path, _data: dict[str, Any]) -> None:
        path = model / file
        values = {**(json.loads(path.read_text()) if path.exists() else {}), **changed}
        path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))

    return edit


def of_family(kind: str, architecture: str, **changed: Any) -> Edit:
    return keys(model_type=kind, architectures=[architecture], **changed)


def content(file: str, written: bytes) -> Edit:
    return lambda model, _data: (model / file).write_bytes(written)


def without(file: str) -> Edit:
    return lambda model, _data: (model / file).unlink()


def tensor(name: str, shape: tuple[int, ...] | None, dtype: type = np.float16) -> Edit:
    """Replaces a tensor; without a shape, removes it."""

    def edit(model: Path, _data: dict[str, Any]) -> None:
        tensors = load_file(model / WEIGHTS)
        if tensors.pop(name, None) is None or shape is not None:
            tensors[name] = np.zeros(shape or (), dtype)
        save_file(tensors, model / WEIGHTS)

    return edit


def renamed(old: str, new: str) -> Edit:
    """Renames tensors, in every layer."""

    def edit(model: Path, _data: dict[str, Any]) -> None:
        tensors = load_file(model / WEIGHTS)
        save_file({n.replace(old, new): t for n, t in tensors.items()}, model / WEIGHTS)

    return edit


def tokenizer_of(words: Model) -> Edit:
    """Replaces the tokenizer by one with this vocabulary."""

    def edit(model: Path, _data: dict[str, Any]) -> None:
        Tokenizer(words).save(str(model / "tokenizer.json"))
        (model / TEMPLATE).write_text("{}")

    return edit


def of_yaml(**changed: Any) -> Edit:
    return lambda _model, data: data["models"][0].update(changed)


def both(*edits: Edit) -> Edit:
    return lambda model, data: [edit(model, data) for edit in edits]


def without_layer(model: Path, _data: dict[str, Any]) -> None:
    tensors = load_file(model / WEIGHTS)
    save_file({n: t for n, t in tensors.items() if ".layers.0." not in n}, model / WEIGHTS)


def cut(model: Path, _data: dict[str, Any]) -> None:
    os.truncate(model / WEIGHTS, (model / WEIGHTS).stat().st_size - 100)


def damage(old: bytes, new: bytes) -> Edit:
    """Replaces bytes of the file of weights."""
    return lambda model, _data: (model / WEIGHTS).write_bytes(
        (model / WEIGHTS).read_bytes().replace(old, new, 1)
    )


def half_an_index(model: Path, _data: dict[str, Any]) -> None:
    """Writes two shards, and an index that names one of them."""
    tensors = load_file(model / WEIGHTS)
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[:15], "model-2.safetensors": names[15:]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, model / shard)
    (model / WEIGHTS).unlink()
    listed = dict.fromkeys(names[:15], "model-1.safetensors")
    (model / INDEX).write_text(json.dumps({"weight_map": listed}))


def more_tokens(model: Path, _data: dict[str, Any]) -> None:
    path = model / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([f"<more{i}>" for i in range(40)])
    tokenizer.save(str(path))


def twice(_model: Path, data: dict[str, Any]) -> None:
    data["models"].append(dict(data["models"][0]))


GEMMA3 = partial(of_family, "gemma3_text", "Gemma3ForCausalLM", head_dim=8, sliding_window=16)
MISTRAL = partial(of_family, "mistral", "MistralForCausalLM")
LATENT = of_family(
    "minicpm3",
    "MiniCPM3ForCausalLM",
    kv_lora_rank=8,
    q_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
)
SLIDES = ["full_attention", "sliding_attention"]
FP8 = {"quantization_config": {"quant_method": "fp8"}}
# As WRONG of test_wrong_models.
WRONG_TP: dict[str, tuple[Edit, str]] = {
    "tp that does not divide the heads": (
        of_yaml(tp=3),
        "models[0].tp: 2 KV heads cannot be shared by 3 devices; choose a divisor",
    ),
    "tp that does not divide the query heads of latent attention": (
        both(LATENT, of_yaml(tp=3)),
        "models[0].tp: 4 query heads cannot be shared by 3 devices; choose a divisor",
    ),
    "tp that does not divide a family's KV heads": (
        both(of_family("olmo2", "Olmo2ForCausalLM", num_key_value_heads=1), of_yaml(tp=2)),
        "models[0].tp: 1 KV heads of olmo2 cannot be shared by 2 devices; choose a divisor",
    ),
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
