"""Packages with policies, installed as `pip` does it, without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prism.policies import registry
from tests.policies import giving_up

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "least_loaded"


def install_example(folder: Path) -> Path:
    """Builds the example's package by its build backend. Returns the folder to import it from."""
    source, target = folder / "source", folder / "site"
    shutil.copytree(EXAMPLE, source)  # setuptools builds next to the sources
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(target)]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", str(source)]
    subprocess.run([*command, *offline], check=True)
    return target


def write_package(folder: Path, package: str, code: str, *entry_points: str) -> None:
    """Writes an installed package of one module."""
    module = package.replace("-", "_")
    info = folder / f"{module}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text("\n".join(["[prism.policies]", *entry_points, ""]))
    (folder / f"{module}.py").write_text(code)


def install_giving_up(folder: Path, patch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs the policy "giving-up" for new processes. Returns a function that sets the models to
    give up."""
    site, names = folder / "site", folder / "given-up"
    code = Path(giving_up.__file__).read_text()
    write_package(site, "giving-up-policy", code, "giving-up = giving_up_policy:POLICY")
    patch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    patch.setenv(giving_up.FILE, str(names))

    def give_up(*models: str) -> None:
        names.write_text(" ".join(models))

    return give_up


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Makes a folder importable in this process and resets the cache of installed policies."""
    before = {*sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        _forget()
        yield
    for name in {*sys.modules} - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    _forget()


def _forget() -> None:
    registry.entry_points.cache_clear()
    registry.get.cache_clear()
