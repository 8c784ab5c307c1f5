"""Random steps of two_processes.py, on the host device and on the test libcuda at once."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from .compiling import ROOT
from .libcuda import LibCuda

pytestmark = pytest.mark.slow


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("examples", [60, pytest.param(6_000, marks=pytest.mark.long)])
def test_two_processes_agree_with_a_dict(libcuda: LibCuda, examples: int) -> None:
    """Takes 20,000 steps, a million with the marker `long`."""
    seed = time.time_ns() % 10**9
    command = [sys.executable, "-m", "tests.kvcached.two_processes"]
    running = [
        subprocess.Popen(
            [*command, device, str(seed), str(examples)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for device in ("host:0", "cuda:0")
    ]
    for process in running:
        said, _ = process.communicate()
        print(said)
        assert process.returncode == 0, said[-6000:]
