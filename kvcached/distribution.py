"""Whether the package `kvcached` of another project is installed beside this one."""

from __future__ import annotations

import os
import sys

from kvcached.errors import ConflictingPackageError

_OTHER = "kvcached-"


def refuse_conflicting_distribution() -> None:
    """Raises ConflictingPackageError if a distribution called kvcached is installed.

    It installs the same import name and hooks itself into engines; the two cannot work together.
    """
    version = next((found for folder in sys.path for found in _versions(folder)), None)
    if version is None:
        return
    raise ConflictingPackageError(
        f"the distribution kvcached {version} is installed beside prism-kvcached; both provide the "
        "package 'kvcached' and only one can work: run 'pip uninstall kvcached', then reinstall "
        "prism-kvcached (or uninstall prism-kvcached to keep the other)"
    )


def _versions(folder: str) -> list[str]:
    """Of distributions called kvcached in a folder, by the name of their metadata.

    Not by importlib.metadata, whose import takes as long as that of all of kvcached.
    """
    try:
        names = os.listdir(folder or ".")
    except OSError:  # a zip, or a folder that is not there
        return []
    ours = (name for name in names if name.startswith(_OTHER))
    ends = (".dist-info", ".egg-info")
    return [name.removeprefix(_OTHER).rpartition(".")[0] for name in ours if name.endswith(ends)]
