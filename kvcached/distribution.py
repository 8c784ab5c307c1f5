"""Checks for other packages `kvcached`: of another project, or the sources of a checkout."""

from __future__ import annotations

import os
import sys

from kvcached.errors import ConflictingPackageError, UncompiledCheckoutError

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


def refuse_uncompiled_checkout() -> None:
    """Raises UncompiledCheckoutError if this package is a checkout's folder without `_core`.

    Python finds that folder before the installed package if it runs in the checkout.
    """
    checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not os.path.isfile(os.path.join(checkout, "CMakeLists.txt")):
        return
    raise UncompiledCheckoutError(
        f"Python found the sources of kvcached in {checkout}, which are not compiled, before an"
        " installed prism-kvcached: run Python in another folder, or run 'pip install -e"
        f" {checkout}' to use the checkout itself"
    ) from None


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
