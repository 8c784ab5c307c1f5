"""Wheels of kvcached and prism, built from this checkout for another Python."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from scripts.gpu_wheels.manifest import Entry, FileFacts

PROJECTS = (".", "prism")
PYENV = Path.home() / ".pyenv"


class CannotBuild(RuntimeError):
    """Error for a missing Python, or for sources that do not compile."""


def build(out: Path, python: str, root: Path) -> list[Entry]:
    """Writes the wheels into the folder `out`. Build requirements come from the package index."""
    interpreter = find_python(python)
    with tempfile.TemporaryDirectory(prefix="gpu-wheels-") as folder:
        pip = (interpreter, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps")
        projects = [str(root / project) for project in PROJECTS]
        done = subprocess.run(
            [*pip, "-w", folder, *projects], capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["pip printed nothing"]
            errors = [line.strip() for line in lines if "error" in line.lower()] or lines[-3:]
            raise CannotBuild(f"{interpreter} cannot build this checkout: {'; '.join(errors[:3])}")
        return [_entry(wheel, out) for wheel in sorted(Path(folder).glob("*.whl"))]


def _entry(wheel: Path, out: Path) -> Entry:
    made = Path(shutil.copy(wheel, out))
    name, version = wheel.name.split("-")[:2]
    return Entry(name=name, version=version, file=FileFacts.of(made))


def find_python(version: str) -> str:
    """Returns an interpreter of this version ("3.12"), on the path or of pyenv.

    Raises CannotBuild where none runs. pyenv puts a shim on the path for versions that are not
    chosen, too: its own interpreters are found next to the shims.
    """
    on_path = shutil.which(f"python{version}")
    roots = [Path(on_path).parent.parent] if on_path else []
    installed = (root.glob(f"versions/{version}.*/bin/python") for root in (*roots, PYENV))
    found = [on_path, *sorted({str(path) for paths in installed for path in paths})]
    for python in filter(None, found):
        command = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return python
    raise CannotBuild(f"Python {version} is not on the path; install it with its headers")
