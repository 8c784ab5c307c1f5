"""Samples of stacks, as `lab.engine_check --stacks` writes them and gpu-check counts them."""

from __future__ import annotations

import time
from pathlib import Path

from lab.engine_check import sampled
from scripts.gpu_check.serving.stacks import hottest


def busy(seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pass


def decode(seconds: float) -> None:
    busy(seconds)


def test_functions_are_counted_below_the_one_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "stacks"
    with sampled(file, 0.01):
        decode(0.5)
        busy(0.2)
    found = hottest(file.read_text(), "decode")
    assert 3 <= found["samples"] <= 60
    assert found["gpu_check/test_stacks.py:busy"] == found["samples"]
    assert not [name for name in found if name.endswith(":decode")]
    assert hottest(file.read_text(), "absent") == {"samples": 0}


def test_nothing_is_sampled_without_a_file() -> None:
    with sampled(None, 0.01):
        busy(0.01)
