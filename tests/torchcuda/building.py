"""Builds the front's library for the torch at hand."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from tests.kvcached.compiling import build

FRONT = Path(__file__).parent / "front"


def build_front() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None, "torch is not installed"
    options = ["-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1"]
    options.append(f"-DTORCH={Path(found.origin).parent}")
    tree = f"torch-{importlib.metadata.version('torch')}"
    return build(tree, "torchcuda", "libtorchcuda.so", *options, source=FRONT)
