"""Importing transformers where torchvision's compiled half cannot load.

torchvision registers fake kernels for operators that its binary defines. The binary of the
default wheel is linked against CUDA; beside torch's CPU build the operators are missing and every
import of transformers' model classes fails. They are never called, so their schemas are enough.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[object] = []  # an operator lives as long as the library that declared it


def declare_torchvision_operators() -> None:
    """Idempotent; does nothing where torchvision is imported already or brings its operators:
    an operator that is declared twice ends the process."""
    import torch

    if "torchvision" in sys.modules or hasattr(torch.ops.torchvision, "nms"):
        return
    if _load_torchvision_binary():
        return
    library = torch.library.Library("torchvision", "DEF")
    for schema in OPERATORS:
        library.define(schema)
    _libraries.append(library)


def _load_torchvision_binary() -> bool:
    """Whether torchvision's operators could be loaded, as its own import does it first."""
    import torch

    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return False
    for path in sorted(Path(package.origin).parent.glob("_C*.so")):
        try:
            torch.ops.load_library(path)
        except OSError:  # it is linked against CUDA libraries that are not there
            continue
        return True
    return False


def import_transformers() -> Any:
    """The transformers module, usable and offline. Takes seconds the first time."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    declare_torchvision_operators()
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
