"""Folder of carried wheels, which scripts/gpu-wheels made."""

from __future__ import annotations

import json
from pathlib import Path

from lab.gpu_check.report import ROOT
from scripts.gpu_wheels.manifest import NAME, digest_of_sources


def hold_this_checkout(folder: Path | None) -> bool:
    """Returns whether the wheels have kvcached and prism of this checkout's state."""
    if folder is None or not (folder / NAME).exists():
        return False
    made = json.loads((folder / NAME).read_text())
    return bool(made.get("sources") == digest_of_sources(ROOT))


def of(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns the wheels of kvcached and prism, and those of others."""
    found = sorted(folder.glob("*.whl"))
    own = [path for path in found if path.name.startswith(("prism_kvcached-", "prism_serving-"))]
    return own, [path for path in found if path not in own]
