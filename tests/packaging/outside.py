"""The conftest of the tests that are run on an installed wheel, where `prism` is not needed."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

import kvcached


def pytest_report_header() -> str:
    return f"on {Path(kvcached.__file__).parent}"


@pytest.fixture
def namespace() -> str:
    """Keys and shared-memory segments of one test."""
    return f"t{uuid4().hex[:10]}"
