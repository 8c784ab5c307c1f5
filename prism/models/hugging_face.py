"""Import of transformers, also if torchvision's compiled library cannot be loaded."""

from __future__ import annotations

import importlib
import os
from typing import Any

from kvcached.engines.stand_ins import declare_torchvision_operators


def import_transformers() -> Any:
    """Imports transformers in offline mode and without its logs. Takes seconds the first time."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    declare_torchvision_operators()
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
