"""Stand-ins for modules that engines import and that a machine without a GPU does not have.

Triton: SGLang has a stand-in for macOS, which a finder here serves. torchvision's compiled half: it
registers fake kernels for operators that its binary defines, and the default wheel's binary is
linked against CUDA. With torch's CPU build the operators are missing, and every import of
transformers' model classes fails. They are never called, so declaring their schemas is enough.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[object] = []  # an operator lives as long as the library that declared it


def install_for_sglang() -> None:
    """Installs both stand-ins; does nothing where the real modules are installed.

    REQUIRES: sglang is not imported yet. Idempotent.
    """
    stand_in_for_triton()
    declare_torchvision_operators()


def stand_in_for_triton() -> None:
    """Installs the stand-in for Triton, unless Triton is installed. Idempotent."""
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        return
    # Inductor needs a real Triton; without one a compiled function fails at its first call.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    sys.meta_path.insert(0, _TritonStandIn(_load_sglang_stubs()))


def declare_torchvision_operators() -> None:
    """Declares torchvision's operators, unless it is imported already or brings them. Idempotent.

    Declaring an operator twice ends the process.
    """
    import torch

    if "torchvision" in sys.modules or hasattr(torch.ops.torchvision, "nms"):
        return
    if _load_torchvision_binary():
        return
    library = torch.library.Library("torchvision", "DEF")
    for schema in OPERATORS:
        library.define(schema)
    _libraries.append(library)


def _load_torchvision_binary() -> bool:
    """Returns whether torchvision's operators could be loaded, as its own import first tries."""
    import torch

    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return False
    for path in sorted(Path(package.origin).parent.glob("_C*.so")):
        try:
            torch.ops.load_library(path)
        except OSError:  # linked against CUDA libraries that are not installed
            continue
        return True
    return False


class _TritonStandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder that serves SGLang's mock module for every `import triton...`."""

    def __init__(self, stubs: types.ModuleType) -> None:
        self._stubs = stubs

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "triton":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module: types.ModuleType = self._stubs._MockModule(spec.name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "triton":
            module.__version__ = "3.0.0"  # type: ignore[attr-defined]
            module.cdiv = self._stubs._cdiv  # type: ignore[attr-defined]
            module.next_power_of_2 = self._stubs._next_power_of_2  # type: ignore[attr-defined]
            module.Config = self._stubs._Config  # type: ignore[attr-defined]
        elif module.__name__ in ("triton.compiler.compiler", "triton.runtime.cache"):
            module.triton_key = self._stubs._triton_key  # type: ignore[attr-defined]


def _load_sglang_stubs() -> types.ModuleType:
    """Returns SGLang's stubs file as a module. Importing its package would require Triton."""
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("sglang is not installed: install the engine's requirements")
    path = Path(package.origin).with_name("_platform_stubs.py")
    spec = importlib.util.spec_from_file_location("kvcached._sglang_platform_stubs", path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"sglang's installation does not have a readable {path.name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
