"""The functions of an engine adapter (see `prism.engines.core`)."""

from __future__ import annotations

import importlib
from pathlib import Path

from kvcached import WeightKey
from prism.config.checks.memory_needs import EngineTraits
from prism.engines.core import EngineContext, EngineCore
from prism.engines.fake.options import FakeOptions
from prism.messages.model_spec import ModelSpec


def lacks(device: str) -> str:
    if device.startswith("host:") or FakeOptions.from_environment().cpu_reads_gpu:
        return ""
    return f"the fake engine cannot serve on {device}"


def refuses(model: Path, embeds: bool = False) -> str:
    """Returns "", since the engine does not read the model's files."""
    return ""


def parser_names() -> dict[str, list[str]]:
    """Returns no names, since answers of this engine are not parsed."""
    return {}


def preload(device: str = "host:0") -> None:
    """Imports the core; the imports are the same on every device."""
    for name in ("numpy", "kvcached", "prism.engines.fake.core"):
        importlib.import_module(name)


def traits() -> EngineTraits:
    """Returns the defaults, so that the configuration alone decides."""
    return EngineTraits()


def create(context: EngineContext) -> EngineCore:
    """Creates the core. Raises ConfigError if PRISM_FAKE cannot be parsed."""
    from prism.engines.fake.core import FakeCore

    return FakeCore(context, FakeOptions.from_environment())


def weight_key(
    content: str, spec: ModelSpec, rank: int = 0, ranks: int = 1, device: str = "host:0"
) -> WeightKey:
    """Returns a key under which nothing is stored, since this engine loads the files as they
    are."""
    return WeightKey(content, "fake", spec.dtype, rank, ranks)
