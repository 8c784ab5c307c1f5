"""Processes that have the double. Each of its rules runs in a separate forked one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.torchcuda import ROOT, cuda_environment

Outcomes = dict[str, dict[str, Any]]


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("slow")
    item.add_marker("first")


@cache
def outcomes_of(module: str) -> Outcomes:
    """Returns the outcome of each rule of a module by name."""
    script = f"from tests.torchcuda.forked import main; main({module!r})"
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        env=cuda_environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found: Outcomes = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture
def holds() -> Callable[..., None]:
    """Asserts that a rule's process ended with `status`, 0 unless it must crash."""

    def check(module: str, rule: str, status: int = 0) -> None:
        outcome = outcomes_of(module)[rule]
        assert outcome["status"] == status, outcome["said"]

    return check
