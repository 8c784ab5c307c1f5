"""Tests on a real GPU. Where there is none they are skipped, and say why."""

from __future__ import annotations

import ctypes
import os

import pytest


def why_no_gpu() -> str:
    """Empty if the real driver shows a GPU to a fresh process like this one."""
    if os.environ.get("KVCACHED_LIBCUDA"):
        return "KVCACHED_LIBCUDA names another library than the driver's own"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no NVIDIA driver: {error}"
    result = driver.cuInit(0)
    return f"cuInit answers {result}: no usable GPU" if result else ""


@pytest.fixture(scope="session")
def gpu() -> None:
    """Skips without a GPU. Run this folder alone: other tests load the test libcuda."""
    if reason := why_no_gpu():
        pytest.skip(f"needs a GPU ({reason})")
