"""Fixtures shared by all tests: a real Redis-compatible server of this test session's own."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import settings

from prism.queueing.server import BundledRedis

HERE = Path(__file__).parent
CLUSTERS = {
    "acceptance", "agent", "bench", "cluster", "engines", "frontend", "models", "queueing",
    "replay", "scheduler", "serve", "sglang",
}  # fmt: skip
"""Folders whose tests start processes that wait for each other; one worker runs them all, in order,
so that two clusters never share the cores."""
WHOLE = {"costs", "packaging", "parity"}
"""Folders whose files go to one worker each: fixtures build a wheel or start engines, once."""

# a busy machine fails no test
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


def pytest_configure() -> None:
    """A shell has what it runs in the background ignore SIGINT, and children inherit that; tests
    send it to theirs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers (`-n 2 --dist loadgroup`): one for clusters, the others for the rest."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        file = item.path.relative_to(HERE)
        if file.parts[0] in CLUSTERS:
            item.add_marker(pytest.mark.xdist_group("clusters"))
        elif file.parts[0] in WHOLE:
            item.add_marker(pytest.mark.xdist_group(str(file)))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[BundledRedis]:
    """A real server on a unix socket below a directory of its own; `.url` for clients.

    Tests share it: take a fresh `namespace`, and never stop or kill this one (start a
    `BundledRedis(short_dir)` of your own for that).
    """
    with (
        tempfile.TemporaryDirectory(prefix="prism-redis-") as directory,
        BundledRedis(Path(directory)) as server,
    ):
        yield server


@pytest.fixture
def namespace() -> str:
    """Keys and shared-memory segments of one test."""
    return f"t{uuid4().hex[:10]}"


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for unix sockets (pytest's tmp_path may not)."""
    with tempfile.TemporaryDirectory(prefix="prism-") as directory:
        yield Path(directory)
