"""Downloading the pinned wheels for another Python than the running one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# pip takes each manylinux version literally: those in use up to the target's glibc 2.39.
GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35, 39)
LEGACY = ("manylinux1", "manylinux2010", "manylinux2014")


class CannotFetch(RuntimeError):
    """Error for an index that does not have a wheel for that Python, or cannot be reached."""


def read_pins(path: Path) -> list[str]:
    """Returns the lines `name==version` of a requirements file."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def platforms() -> list[str]:
    return [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + [f"{n}_x86_64" for n in LEGACY]


def download(pins: list[str], python: str, folder: Path) -> list[Path]:
    """Downloads one wheel for each pin, without requirements. Returns them sorted by name."""
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for platform in platforms():
        options += ["--platform", platform]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    done = subprocess.run([*command, *options, *pins], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise CannotFetch(f"pip: {' '.join(errors) or done.stderr.strip()}")
    return sorted(folder.glob("*.whl"))
