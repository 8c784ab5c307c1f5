"""Tests on a real GPU. Without one they are skipped, with the reason."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ASK = """
import ctypes
try:
    result = ctypes.CDLL("libcuda.so.1").cuInit(0)
    print(f"cuInit answers {result}: no usable GPU" if result else "")
except OSError as error:
    print(f"no NVIDIA driver: {error}")
"""


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("slow")


def why_no_gpu() -> str:
    """Returns "" if the real driver shows a GPU to a fresh process like this one."""
    if os.environ.get("KVCACHED_LIBCUDA"):
        return "KVCACHED_LIBCUDA names another library than the driver's own"
    # In a separate process: this one may have loaded the test libcuda, which has the same name.
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(scope="session")
def gpu() -> None:
    """Skips without a GPU. Run this folder alone: other tests load the test libcuda."""
    if reason := why_no_gpu():
        pytest.skip(f"needs a GPU ({reason})")
    # On the test libcuda work proceeds while a call waits for it, as on a GPU.
    os.environ.setdefault("KVCACHED_TEST_CUDA_PROGRESS", "1")
