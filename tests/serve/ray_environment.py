"""Separate virtual environment for Ray and the other packages of requirements/ray.txt."""

from __future__ import annotations

import site
import sys
from functools import cache
from pathlib import Path

from tests.serve.machines import ROOT, run


@cache
def ray_bin() -> Path:
    """Returns the folder of its commands, which also find the packages of this environment."""
    requirements, venv = ROOT / "requirements" / "ray.txt", ROOT / ".cache" / "ray"
    made = venv / "requirements.txt"
    if not made.exists() or made.read_text() != requirements.read_text():
        run(sys.executable, "-m", "venv", "--clear", venv)
        run(venv / "bin" / "python", "-m", "pip", "install", "-q", "-r", requirements)
        beside = next(venv.glob("lib/python3*/site-packages")) / "beside.pth"
        beside.write_text(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")
        made.write_text(requirements.read_text())
    return venv / "bin"
