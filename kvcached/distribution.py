"""Whether the package `kvcached` of another project is installed beside this one."""

from __future__ import annotations

from importlib import metadata

from kvcached.errors import ConflictingPackageError


def refuse_conflicting_distribution() -> None:
    """Raises ConflictingPackageError if a distribution called kvcached is installed.

    It installs the same import name and hooks itself into engines; the two cannot work together.
    """
    try:
        version = metadata.version("kvcached")
    except metadata.PackageNotFoundError:
        return
    raise ConflictingPackageError(
        f"the distribution kvcached {version} is installed beside prism-serving; both provide the "
        "package 'kvcached' and only one can work: run 'pip uninstall kvcached', then reinstall "
        "prism-serving (or uninstall prism-serving to keep the other)"
    )
