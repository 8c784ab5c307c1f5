"""Public surface: the names of the package, its exceptions, and the cost of its import."""

from __future__ import annotations

import copy
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvcached
from kvcached import errors

PUBLIC = [
    "AddressUsage",
    "Checkpoint",
    "CheckpointTensor",
    "Client",
    "ClientUsage",
    "Demand",
    "Device",
    "DeviceUsage",
    "DriverMemory",
    "Fragmentation",
    "GpuFacts",
    "Heads",
    "Holder",
    "HybridLayout",
    "KVCache",
    "KVCacheGroup",
    "KVCounters",
    "KVLayout",
    "KvcachedError",
    "Latent",
    "LayerGroup",
    "Layout",
    "LayoutChoice",
    "LoadOptions",
    "MLALayout",
    "MemoryDrift",
    "MixedLayout",
    "NoRoomError",
    "Offer",
    "Prefetch",
    "PrefixCache",
    "ProcessMemory",
    "RankKV",
    "Segment",
    "SegmentClient",
    "ShrinkAnswer",
    "ShrinkOrder",
    "ShrinkPolicy",
    "ShrinkRequest",
    "Shrunk",
    "StaticLease",
    "StoreCounters",
    "StoredWeights",
    "TensorSpec",
    "TensorView",
    "VirtualTensor",
    "WeightArena",
    "WeightBuilder",
    "WeightKey",
    "WeightLayout",
    "WeightLinks",
    "WeightLoad",
    "WeightStore",
    "choose_layout",
    "collect_garbage",
    "errors",
    "gpu_facts",
    "segment_path",
    "segments",
    "spares_then_idle_caches",
]


def run_python(code: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_public_names_are_pinned() -> None:
    assert kvcached.__all__ == PUBLIC
    assert all(hasattr(kvcached, name) for name in kvcached.__all__)


def test_the_drawn_tree_is_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"(\w+Error)\b", errors.__doc__.split("A call that raises")[0])
    made = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.KvcachedError)
    }
    assert set(drawn) - {"ValueError", "ImportError"} == made


def test_no_room_keeps_its_figures_when_sent_to_another_process() -> None:
    error = errors.NoRoomError("full", 5, 3)
    twin = copy.copy(error)  # goes the way of pickling
    assert (str(twin), twin.need_bytes, twin.free_bytes) == ("full", 5, 3)


def test_import_needs_the_standard_library_alone() -> None:
    """Loads neither torch nor numpy, which are slow (bench/import_time.py measures the import)."""
    loaded = run_python(
        "import sys; before = set(sys.modules); import kvcached\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    assert loaded.returncode == 0, loaded.stderr
    assert set(loaded.stdout.split()) - sys.stdlib_module_names == {"kvcached"}
    assert (
        "importlib.metadata"
        not in run_python("import sys, kvcached; print(*sys.modules)").stdout.split()
    )


def test_only_adapters_and_tools_import_the_package() -> None:
    """Prevents cycles: the package imports all other modules, so these import each other
    (`from kvcached import nvml`)."""
    folder = Path(kvcached.__file__).parent
    modules = {path.stem for path in folder.glob("*.py")}
    for path in folder.rglob("*.py"):
        if path.relative_to(folder).parts[0] not in {"engines", "tools"}:
            names = re.findall(r"^ *from kvcached import (\w+)", path.read_text(), re.MULTILINE)
            assert modules.issuperset(names), path


def test_the_other_distribution_of_this_name_is_refused(tmp_path: Path) -> None:
    info = tmp_path / "kvcached-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcached\nVersion: 0.1.2\n")
    code = (
        "try:\n    import kvcached\n"
        "except ImportError as error:\n    print(type(error).__name__, error)"
    )
    refused = run_python(code, PYTHONPATH=str(tmp_path))
    assert refused.stdout.startswith("ConflictingPackageError"), refused.stderr
    assert "kvcached 0.1.2" in refused.stdout
    assert "pip uninstall kvcached" in refused.stdout


def test_sources_of_a_checkout_say_how_to_install_them(tmp_path: Path) -> None:
    """Puts a checkout first in sys.path, as Python does in its folder."""
    checkout = tmp_path / "checkout"
    shutil.copytree(
        Path(__file__).parent.parent.parent / "kvcached",
        checkout / "kvcached",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    (checkout / "CMakeLists.txt").touch()
    code = f"import sys; sys.path.insert(0, {str(checkout)!r}); import kvcached"
    refused = run_python(code, "-S")
    last = refused.stderr.splitlines()[-1]
    assert last.startswith("kvcached.errors.UncompiledCheckoutError: Python found the sources of")
    assert f"run 'pip install -e {checkout}'" in refused.stderr
    assert "No module named" not in refused.stderr

    (checkout / "CMakeLists.txt").unlink()  # a damaged installation, not a checkout
    assert "No module named 'kvcached._core'" in run_python(code, "-S").stderr


def test_the_version_is_that_of_the_distribution() -> None:
    assert kvcached.__version__ == importlib.metadata.version("prism-kvcached")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        getattr(kvcached, "nonsense")  # noqa: B009 (mypy knows that it is not there)
