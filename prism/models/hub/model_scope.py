"""Snapshots of ModelScope's hub in the cache of the package modelscope, which shows progress."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from prism.errors import ConfigError, ModelSourceError, NotDownloadedError
from prism.models.hub.hub_model import IGNORED, HubName, joined


def cached(hub_name: HubName) -> Path:
    """Returns the folder of a revision in the cache. Raises NotDownloadedError."""
    repo, revision, _ = hub_name
    library, failures = _imported()
    try:
        return Path(library.snapshot_download(repo, revision=revision, local_files_only=True))
    except failures as error:
        name = joined(*hub_name)
        raise NotDownloadedError(
            f"{name} is not in the cache of ModelScope; run prism-models pull {name}"
        ) from error


def download(hub_name: HubName) -> Path:
    """Downloads a revision. Returns the folder. Raises ModelSourceError."""
    repo, revision, _ = hub_name
    library, failures = _imported()
    wanted = {"allow_patterns": hub_name.wanted, "ignore_patterns": IGNORED}
    try:
        return Path(library.snapshot_download(repo, revision=revision, **wanted))
    except failures as error:
        why = " ".join(str(error).split())[:200]
        raise ModelSourceError(
            f"{joined(*hub_name)}: ModelScope's download failed: {why}; correct the name, or"
            " try again"
        ) from error


def _imported() -> tuple[Any, tuple[type[Exception], ...]]:
    """Returns modelscope's module for snapshots, and the errors that it raises. Raises
    ConfigError."""
    try:
        library = importlib.import_module("modelscope.hub.snapshot_download")
        errors = importlib.import_module("modelscope_hub.errors")
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ConfigError(
            f"SGLANG_USE_MODELSCOPE is set, but the package {package} is not installed; run pip"
            " install modelscope, or unset the variable"
        ) from error
    return library, (errors.HubError, OSError, ValueError)
