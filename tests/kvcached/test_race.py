"""Eight processes that want twice the device, checked by the ledger and by resident bytes."""

from __future__ import annotations

import subprocess
import time

import pytest

from .compiling import build_race
from .conftest import EVERY_DEVICE
from .libcuda import LibCuda

pytestmark = pytest.mark.slow


@EVERY_DEVICE
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("operations", [100_000, pytest.param(10_000_000, marks=pytest.mark.long)])
def test_eight_processes_get_no_more_than_there_is(
    libcuda: LibCuda, device_name: str, operations: int
) -> None:
    """Reads coherent states: the clients' charges add up to the total, and fit."""
    command = [build_race(), device_name, str(operations), str(time.time_ns() % 10**9)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (command, done.stderr)
    print(done.stdout)
