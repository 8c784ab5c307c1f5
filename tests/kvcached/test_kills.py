"""Kills at every step of the ledger and of page creation, map, unmap and release."""

from __future__ import annotations

import re
import subprocess
from functools import cache

import pytest

from .compiling import ROOT, build_kills
from .libcuda import LibCuda

pytestmark = pytest.mark.slow


def steps_of_the_sources() -> set[str]:
    """Returns the name of each step("...") in csrc and in the decorator that fails calls."""
    files = [path for path in (ROOT / "csrc").iterdir() if path.name != "steps.h"]
    files.append(ROOT / "tests" / "cpp" / "vmm_fault.cpp")
    return {name for path in files for name in re.findall(r'\bstep\("([^"]+)"\)', path.read_text())}


@cache
def kills_on(device_name: str) -> subprocess.CompletedProcess[str]:
    program = build_kills()
    return subprocess.run([program, device_name], capture_output=True, text=True, check=False)


@pytest.mark.timeout(900)  # most of it is compiling
@pytest.mark.parametrize("device_name", ["host:0", "cuda:0"])
def test_a_death_at_any_step_leaves_the_capacity_whole(libcuda: LibCuda, device_name: str) -> None:
    done = kills_on(device_name)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(900)
def test_every_step_of_the_sources_is_died_at(libcuda: LibCuda) -> None:
    """Detects a new step that no scenario of tests/kills passes."""
    said = kills_on("host:0").stdout + kills_on("cuda:0").stdout
    passed = {line.removeprefix("step ") for line in said.splitlines() if line.startswith("step ")}
    assert passed == steps_of_the_sources()
