"""A scripted server on a free port, and the path of the offline traces where they exist."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.replay.scripted_server import ScriptedServer, running

PUBLIC_TRACES = Path(os.environ.get("PRISM_TRACES", Path(__file__).parents[3] / "shared/traces"))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with running(ScriptedServer()) as found:
        yield found


@pytest.fixture
def public_traces() -> Path:
    if not PUBLIC_TRACES.is_dir():
        pytest.skip(f"no public traces in {PUBLIC_TRACES}; set PRISM_TRACES")
    return PUBLIC_TRACES
