"""The two functions of an engine adapter (see `prism.engines.core`)."""

from __future__ import annotations

import importlib

from prism.engines.core import EngineContext, EngineCore
from prism.engines.fake.options import FakeOptions


def preload() -> None:
    for name in ("numpy", "kvcached", "prism.engines.fake.core"):
        importlib.import_module(name)


def create(context: EngineContext) -> EngineCore:
    """Raises ConfigError when PRISM_FAKE cannot be parsed."""
    from prism.engines.fake.core import FakeCore

    return FakeCore(context, FakeOptions.from_environment())
