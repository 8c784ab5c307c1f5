"""Random LoRA adapters in PEFT's format, and models with them merged into their weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from prism.models.lora_files import CONFIG, WEIGHTS
from prism.models.text_part import text_weight
from tests.sglang.models import path_of

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
_SCALE = 2.0  # strong enough to change what a random model says


def make_adapter(
    folder: Path,
    model: str | Path,
    *,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    layers: Sequence[int] | None = None,
    seed: int = 1,
    **config: Any,
) -> Path:
    """Makes an adapter of `layers` (None: all) of a tiny model, by its name or folder. `config`
    overrides keys of its file."""
    random, tensors = np.random.default_rng(seed), {}
    for name, weight in load_file(_files(model) / "model.safetensors").items():
        parts = name.split(".")
        in_text = text_weight(name) is not None and weight.ndim == 2
        chosen = in_text and parts[-2] in targets
        if not chosen or (layers is not None and int(parts[2]) not in layers):
            continue
        outputs, inputs = weight.shape
        module = f"base_model.model.{name.removesuffix('.weight')}"
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = 0.08 * random.standard_normal(shape, np.float32)
            tensors[f"{module}.lora_{part}.weight"] = values
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": _SCALE * rank,
        "target_modules": list(targets),
        "base_model_name_or_path": str(model),
        "bias": "none",
    }
    (folder / CONFIG).write_text(json.dumps(settings | config))
    return folder


def merged(adapter: Path, model: str | Path, folder: Path) -> Path:
    """Makes the whole model that `model` with `adapter` is equal to."""
    shutil.copytree(_files(model), folder)
    weights = load_file(folder / "model.safetensors")
    changes = load_file(adapter / WEIGHTS)
    for name, part in changes.items():
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            key = f"{module.removeprefix('base_model.model.')}.weight"
            weights[key] = weights[key] + _SCALE * (changes[f"{module}.lora_B.weight"] @ part)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _files(model: str | Path) -> Path:
    return model if isinstance(model, Path) else path_of(model)
