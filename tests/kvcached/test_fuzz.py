"""Damaged segments: a named error or right behaviour, never a crash, a hang or a huge allocation.

A failure prints its seed; `fuzzing.py SEED 1` and `fuzz_segment SEED 1` repeat it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .compiling import build_fuzz

pytestmark = pytest.mark.slow

LONG = pytest.mark.long


def run(command: list[str | Path], timeout_s: float) -> None:
    sanitizers = {"ASAN_OPTIONS": "max_allocation_size_mb=64"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env={**os.environ, **sanitizers},
    )
    assert done.returncode == 0, (done.stdout[-300:], done.stderr[-3000:])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rounds", [300, pytest.param(30_000, marks=LONG)])
def test_damage_below_the_sanitizers(rounds: int) -> None:
    run([build_fuzz(), str(time.time_ns() % 10**9), str(rounds)], 3000)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rounds", [40, pytest.param(5_000, marks=LONG)])
def test_damage_below_python_and_kvctl(rounds: int) -> None:
    seed = time.time_ns() % 10**9
    run([sys.executable, Path(__file__).parent / "fuzzing.py", str(seed), str(rounds)], 3000)
