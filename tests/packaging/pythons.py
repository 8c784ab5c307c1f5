"""Other Pythons than the running one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def interpreter(version: str) -> str:
    """A Python of this version ("3.12"), on the path or of pyenv; skips the test without one."""
    found = [shutil.which(f"python{version}")]
    found += sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))
    for python in filter(None, found):
        # pyenv puts a shim on the path also for versions that are not chosen.
        if subprocess.run([python, "-V"], check=False, capture_output=True).returncode == 0:
            return python
    pytest.skip(f"Python {version} is not here")
