"""Check for an installed distribution of another project that provides the package `kvcached`."""

from __future__ import annotations

import os
import sys

from kvcached.errors import ConflictingPackageError

_OTHER = "kvcached-"


def refuse_conflicting_distribution() -> None:
    """Raises ConflictingPackageError if a distribution named kvcached is installed.

    It installs the same import name and hooks into engines, so the two cannot work together.
    """
    version = next((found for folder in sys.path for found in _versions(folder)), None)
    if version is None:
        return
    raise ConflictingPackageError(
        f"both kvcached {version} and prism-kvcached are installed; both provide the package "
        "'kvcached' and only one can work: run 'pip uninstall kvcached', then reinstall "
        "prism-kvcached (or uninstall prism-kvcached to keep the other)"
    )


def _versions(folder: str) -> list[str]:
    """Returns the versions of distributions named kvcached in a folder, from the metadata's file
    names.

    importlib.metadata is not used: its import takes as long as that of all of kvcached.
    """
    try:
        names = os.listdir(folder or ".")
    except OSError:  # a zip file, or a folder that does not exist
        return []
    ours = (name for name in names if name.startswith(_OTHER))
    ends = (".dist-info", ".egg-info")
    return [name.removeprefix(_OTHER).rpartition(".")[0] for name in ours if name.endswith(ends)]
