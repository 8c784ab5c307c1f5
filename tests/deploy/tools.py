"""Separate environment for the programs of requirements/deploy.txt, and calls of them."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
_CALLS = Path(__file__).with_name("calls.py")


@cache
def tools_bin() -> Path:
    """Returns the folder of its commands. Skips the test if they cannot be installed."""
    requirements, venv = ROOT / "requirements" / "deploy.txt", ROOT / ".cache" / "deploy"
    made = venv / "requirements.txt"
    venv.parent.mkdir(exist_ok=True)
    with (venv.parent / "deploy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes may need it at the same time
        if not made.exists() or made.read_text() != requirements.read_text():
            subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
            install = [venv / "bin" / "python", "-m", "pip", "install", "-q", "-r", requirements]
            done = subprocess.run(install, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"requirements/deploy.txt cannot be installed: {done.stderr[-300:]}")
            made.write_text(requirements.read_text())
    return venv / "bin"


def call(function: str, *arguments: Any) -> Any:
    """Returns what a function of calls.py returns in that environment."""
    text = json.dumps([function, arguments])
    command = [str(tools_bin() / "python"), str(_CALLS)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
