"""Other Pythons than the running one."""

from __future__ import annotations

import pytest

from scripts.gpu_wheels.own import CannotBuild, find_python


def interpreter(version: str) -> str:
    """Returns a Python of this version ("3.12"). Skips the test where there is none."""
    try:
        return find_python(version)
    except CannotBuild as error:
        pytest.skip(str(error))
