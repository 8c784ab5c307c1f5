"""LoRA adapters: in the YAML, and what an engine makes ready for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from prism.messages.models import LoraAdapter, LoraSpec
from prism.models.files import DTYPE_BYTES, ModelFiles
from prism.models.lora import inspect_adapter, lora_base, with_fused


class LoraYaml(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One LoRA adapter of a model: a model of its own for clients, MODEL:ADAPTER. Engines load it
    when a request comes for it."""

    # The part behind the colon in what a request calls it.
    name: str
    # The folder with adapter_config.json and adapter_model.safetensors, in PEFT's format. Relative
    # paths start at the YAML's folder.
    path: str


class LoraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """LoRA adapters in engines."""

    # Adapters of a model that one step can compute with. Memory for so many is leased with it.
    slots: int = 4
    # The largest rank that an adapter may have. Slots are as large as the largest one's.
    rank_max: int = 64


def lora_spec(
    adapters: Sequence[tuple[str, Path]],
    model: tuple[Path, ModelFiles, str],
    key: str,
    engine: LoraConfig,
) -> LoraSpec:
    """`adapters`: name and folder of each. `model`: its folder, files and dtype. Raises ConfigError
    that names the entry below `key`, the YAML key of the list."""
    if not adapters:
        return LoraSpec()
    path, files, dtype = model
    base = lora_base(path, files, key)
    found, targets = [], set[str]()
    for index, (name, folder) in enumerate(adapters):
        rank, modules = inspect_adapter(folder, f"{key}[{index}].path", base, engine.rank_max)
        targets |= modules
        found.append(LoraAdapter(name, str(folder), rank))
    rank, slots = max(a.rank for a in found), min(engine.slots, len(found))
    shapes = {name: shape for name, shape in base.shapes.items() if name in with_fused(targets)}
    widths = sum(sum(shape) for shape in shapes.values())
    slot_bytes = base.layers * rank * widths * DTYPE_BYTES[dtype]
    return LoraSpec(tuple(found), rank, shapes, slots, (slots + 1) * slot_bytes)
