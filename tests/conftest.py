"""Fixtures shared by all tests: a real Redis-compatible server of this test session's own."""

from __future__ import annotations

import gc
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from prism.queueing.server import BundledRedis

# a busy machine fails no test
settings.register_profile("no-deadline", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=15)
settings.load_profile("no-deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out `slow` tests, few examples")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disables garbage collection of objects that stay: it takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    # A shell has what it runs in the background ignore SIGINT, and children inherit that; tests
    # send it to theirs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--quick"):
        settings.load_profile("quick")


def has(item: pytest.Item, marker: str) -> bool:
    """Returns whether a test has a marker, its own or its file's or its folder's."""
    return item.get_closest_marker(marker) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if " at 0x" in item.nodeid:  # processes of one run would collect other tests each
            raise pytest.UsageError(f"{item.nodeid} has an address for an id; give it another one")
    items.sort(key=lambda item: not has(item, "first"))
    if not config.getoption("--quick"):
        return
    left_out = [item for item in items if has(item, "slow") and not has(item, "quick")]
    config.hook.pytest_deselected(items=left_out)
    unwanted = set(left_out)
    items[:] = [item for item in items if item not in unwanted]


@pytest.fixture(scope="session")
def redis_server() -> Iterator[BundledRedis]:
    """Yields a real server on a unix socket in a separate directory; `.url` is for clients.

    Tests share it: take a fresh `namespace`, and never stop or kill this one (start a separate
    `BundledRedis(short_dir)` for that).
    """
    # Imported here: a machine for the GPU tests has numpy and torch, and no Redis.
    from prism.queueing.server import BundledRedis

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
    """Yields a directory whose path leaves room for unix sockets (pytest's tmp_path may not)."""
    with tempfile.TemporaryDirectory(prefix="prism-") as directory:
        yield Path(directory)
