"""Importing transformers where torchvision's compiled half cannot load.

torchvision registers fake kernels for operators that its binary defines. The binary of the
default wheel is linked against CUDA; beside torch's CPU build the operators are missing and every
import of transformers' model classes fails. Declaring their schemas is enough: nobody calls them.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[object] = []  # an operator lives as long as the library that declared it


def declare_torchvision_operators() -> None:
    """Idempotent; does nothing where torchvision is imported already or brings its operators."""
    import torch

    if "torchvision" in sys.modules or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for schema in OPERATORS:
        library.define(schema)
    _libraries.append(library)


def import_transformers() -> Any:
    """The transformers module, usable and offline. Takes seconds the first time."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    declare_torchvision_operators()
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
