"""vLLM's environment below the checkout's cache, with the packages of this checkout in it.

It is installed if it is missing or its requirements have changed, which takes minutes and a package
index.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

from tests.acceptance.harness import ROOT

VENV = ROOT / ".cache" / "vllm"
PYTHON = VENV / "bin" / "python"
# vLLM asks for them without saying which build, gets the ones for CUDA, and cannot import these.
UNUSABLE = ("torchaudio", "torchcodec", "torchvision")


@lru_cache(maxsize=1)
def vllm_python() -> Path:
    """Returns the interpreter that has vLLM and the adapter; installs it if necessary."""
    requirements = ROOT / "requirements" / "vllm.txt"
    made = VENV / "requirements.txt"
    if not made.exists() or made.read_text() != requirements.read_text():
        _run(sys.executable, "-m", "venv", "--clear", VENV)
        _run(PYTHON, "-m", "pip", "install", "-q", "-r", requirements)
        _run(PYTHON, "-m", "pip", "uninstall", "-q", "-y", *UNUSABLE)
        made.write_text(requirements.read_text())
    with tempfile.TemporaryDirectory() as folder:
        ours = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
        ours += ["-w", folder]
        _run(*ours, "-C", f"build-dir={ROOT / '.cache' / 'vllm-build'}", ROOT)
        _run(*ours, ROOT / "prism")
        wheels = Path(folder).glob("*.whl")
        _run(PYTHON, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", *wheels)
    return PYTHON


def variables() -> dict[str, str]:
    """Returns variables for vLLM's processes: none of the running interpreter's, loopback only."""
    others = ("PYTHON", "KVCACHED_", "VLLM_", "SGLANG_")
    return {k: v for k, v in os.environ.items() if not k.startswith(others)} | {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CACHE_ROOT": str(VENV / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # has a way to drop cached prefixes
    }


def _run(*command: str | Path) -> None:
    """Runs a command; fails with its output unless it exits 0."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        list(map(str, command)),
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
