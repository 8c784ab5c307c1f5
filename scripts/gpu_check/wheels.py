"""Carried wheels: a folder that scripts/gpu-wheels made."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from scripts.gpu_check.report import ROOT
from scripts.gpu_wheels.manifest import NAME

SOURCES = ("csrc", "kvcached", "kvcached_plugins", "prism")
SOURCE_SUFFIXES = (".py", ".cpp", ".h", ".lua", ".toml", ".html", ".js", ".css")


def digest_of_sources() -> str:
    """Returns the name of the state of kvcached's and prism's sources, with or without git."""
    digest = hashlib.sha256()
    for path in (ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", *_sources()):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _sources() -> list[Path]:
    files = (path for folder in SOURCES for path in (ROOT / folder).rglob("*"))
    return sorted(path for path in files if path.suffix in SOURCE_SUFFIXES)


def manifest(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / NAME).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def hold_this_checkout(folder: Path | None) -> bool:
    """Returns whether kvcached and prism of this checkout's state are among the wheels."""
    return folder is not None and manifest(folder).get("sources") == digest_of_sources()


def of(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns the wheels of kvcached and prism, and those of others."""
    found = sorted(folder.glob("*.whl"))
    own = [path for path in found if path.name.startswith(("prism_kvcached-", "prism_serving-"))]
    return own, [path for path in found if path not in own]
