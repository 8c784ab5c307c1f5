"""LoRA adapters in the YAML, and the resources that an engine prepares for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prism.config.schema.machines import Strict
from prism.messages.model_spec import LoraAdapter, LoraSpec
from prism.models.files import DTYPE_BYTES, ModelFiles
from prism.models.lora_files import inspect_adapter, lora_base, with_fused


class LoraYaml(Strict, frozen=True):
    """One LoRA adapter of a model. Clients use it as the model MODEL:ADAPTER. Engines load it when
    a request needs it."""

    # The part after the colon in the name that requests use.
    name: str
    # The folder with adapter_config.json and adapter_model.safetensors, in PEFT's format, or the
    # adapter's name in a hub: ORG/NAME or ORG/NAME@REVISION. Relative paths start at the YAML's
    # folder.
    path: str


class LoraConfig(Strict, frozen=True):
    """LoRA adapters in engines."""

    # The most adapters of a model in one step. The model's lease includes memory for them.
    slots: int = 4
    # The largest rank that an adapter may have. Slots have the size of the largest adapter.
    rank_max: int = 64


def lora_spec(
    adapters: Sequence[tuple[str, Path, str]],
    model: tuple[Path, ModelFiles, str],
    key: str,
    engine: LoraConfig,
    *,
    images: bool = False,
) -> LoraSpec:
    """Returns the adapters of a model. Raises ConfigError that names the entry.

    Args:
        adapters: Name, directory and hub's name of each adapter.
        model: Directory, files and dtype of the model.
        key: YAML key of the list, for messages.
        engine: Limits of engines.
        images: It is served with its vision tower.
    """
    if not adapters:
        return LoraSpec()
    path, files, dtype = model
    base = lora_base(path, files, key, images=images)
    found, targets = [], set[str]()
    for index, (name, folder, hub_name) in enumerate(adapters):
        rank, modules = inspect_adapter(folder, f"{key}[{index}].path", base, engine.rank_max)
        targets |= modules
        found.append(LoraAdapter(name, str(folder), rank, hub_name))
    rank, slots = max(a.rank for a in found), min(engine.slots, len(found))
    shapes = {name: shape for name, shape in base.shapes.items() if name in with_fused(targets)}
    widths = sum(sum(shape) for shape in shapes.values())
    slot_bytes = base.layers * rank * widths * DTYPE_BYTES[dtype]
    return LoraSpec(tuple(found), rank, shapes, slots, (slots + 1) * slot_bytes)
