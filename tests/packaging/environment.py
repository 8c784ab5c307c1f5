"""A virtual environment with one wheel and the packages that a test lends it."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


class Environment:
    """An empty environment of this Python below `path`, installed without a network."""

    def __init__(self, path: Path) -> None:
        venv.create(path, with_pip=False)
        self.bin = path / "bin"
        library = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.packages = path / "lib" / library / "site-packages"

    def install(self, wheel: Path) -> None:
        """Installs a wheel as `pip install --no-deps` does."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install"]
        subprocess.run([*pip, "-q", "--no-deps", "--no-index", str(wheel)], check=True)

    def lend(self, *names: str) -> None:
        """Links distributions of the running environment into this one, with their requirements."""
        for name in sorted(with_requirements(names)):
            distribution = metadata.distribution(name)
            tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
            for top in tops:
                source = Path(str(distribution.locate_file(top)))
                if source.exists() and not (self.packages / top).exists():
                    (self.packages / top).symlink_to(source)

    def run(self, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Runs a program of this environment, without the variables of the running one."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=cwd,
            env=kept,
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )


def with_requirements(names: tuple[str, ...]) -> set[str]:
    """Returns these distributions and their requirements without extras, recursively."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        for text in metadata.distribution(name).requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                left.append(needed.name.lower())
    return found
