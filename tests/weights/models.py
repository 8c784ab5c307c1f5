"""Checkpoints for the tests. Imported by worker.py as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import kvcached

Tensors = dict[str, Any]


def tensors(seed: int = 0, layers: int = 4) -> Tensors:
    """Returns some MB of tensors of all types and shapes, also a scalar and an empty one."""
    rng = np.random.default_rng(seed)
    made: Tensors = {
        f"layers.{layer}.w": rng.standard_normal((256, 512 + layer)).astype(np.float32)
        for layer in range(layers)
    }
    made["embed"] = rng.standard_normal((1000, 64)).astype(np.float16)
    made["ids"] = rng.integers(0, 100, 7)
    made["mask"] = rng.integers(0, 2, 9).astype(bool)
    made["scale"] = np.array(seed + 0.5, dtype=np.float32)
    made["nothing"] = np.zeros((0, 3), dtype=np.float32)
    return made


def save_model(directory: Path, made: Tensors | None = None) -> Path:
    """Saves two files and an index, like large models."""
    directory.mkdir(parents=True)
    made = tensors() if made is None else made
    names = list(made)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: made[name] for name in part}, str(directory / file))
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return directory


def stored_arrays(weights: kvcached.StoredWeights) -> Tensors:
    """Returns the stored tensors as arrays."""
    return {
        name: np.frombuffer(weights.buffer(name), dtype=spec.dtype).reshape(spec.shape)
        for name, spec in weights.specs.items()
    }


def arena_arrays(arena: kvcached.WeightArena) -> Tensors:
    """Returns an arena's tensors as arrays on its memory."""
    return {name: np.from_dlpack(arena[name]) for name in arena}


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def files_below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
