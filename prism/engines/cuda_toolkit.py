"""CUDA toolkit with which kernels can be compiled and linked at run time.

Compilers of kernels use `$CUDA_HOME`, otherwise the parent folder of the `nvcc` on the PATH, and
link with libcudart from its lib64. A wrapper in /usr/local/bin would lead them to /usr/local.
This file imports only the standard library, since installers run it by its path: it prints the
toolkit's folder, and exits with 1 if there is none.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

_USUAL = Path("/usr/local/cuda")
_LIBRARY = "libcudart.so"
_FOLDERS = ("lib64", "lib")  # NVIDIA's own, and conda's


def variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment variables that name the toolkit, empty without a toolkit.

    LIBRARY_PATH is among them if libcudart is in the toolkit's lib, which compilers of kernels do
    not search.
    """
    found = find(environment)
    if found is None:
        return {}
    folder = _library_folder(found)
    if folder is None or folder.name == _FOLDERS[0]:
        return {"CUDA_HOME": str(found)}
    paths = [str(folder), *filter(None, environment.get("LIBRARY_PATH", "").split(os.pathsep))]
    return {
        "CUDA_HOME": str(found),
        "LIBRARY_PATH": os.pathsep.join(dict.fromkeys(paths)),
    }


def find(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the first of these folders with bin/nvcc and libcudart: `$CUDA_HOME`, `$CUDA_PATH`,
    /usr/local/cuda, and the folder of the `nvcc` on the PATH after following links."""
    for folder in _candidates(environment):
        if (folder / "bin" / "nvcc").exists() and _library_folder(folder) is not None:
            return folder
    return None


def _candidates(environment: Mapping[str, str]) -> Iterator[Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environment.get(name):
            yield Path(environment[name])
    yield _USUAL
    nvcc = shutil.which("nvcc", path=environment.get("PATH"))
    if nvcc is not None:
        yield Path(nvcc).resolve().parent.parent


def _library_folder(toolkit: Path) -> Path | None:
    folders = (toolkit / name for name in _FOLDERS)
    return next((folder for folder in folders if (folder / _LIBRARY).exists()), None)


if __name__ == "__main__":
    toolkit = find()
    if toolkit is None:
        sys.exit(1)
    print(toolkit)
