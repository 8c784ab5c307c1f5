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


# What `scripts/test` leaves to `scripts/test --all`: folders and files that start engines or
# clusters, or that compile or simulate for long.
SLOW = (
    "acceptance",
    "agent/test_faults.py",
    "agent/test_storm.py",
    "bench",
    "chaos/test_faults.py",
    "chaos/test_junk.py",
    "chaos/test_overload.py",
    "chaos/test_real_engines.py",
    "chaos/test_soak.py",
    "cluster/test_cluster_actions.py",
    "cluster/test_cluster_faults.py",
    "engines",
    "gpu",
    "gpu_check",
    "kvcached/test_cpp.py",
    "kvcached/test_fuzz.py",
    "kvcached/test_kills.py",
    "kvcached/test_race.py",
    "kvcached/test_transformers.py",
    "kvcached/test_two_processes.py",
    "models/test_smollm2.py",
    "packaging",
    "papers/test_all.py",
    "papers/test_cli.py",
    "replay/test_demo.py",
    "serve",
    "sglang",
    "tools/parity/test_live.py",
    "torchcuda",
    "weights/test_deaths.py",
)
# One of each sort runs all the same: the fake engine, a cluster of such, an answer of SGLang.
SAMPLES = (
    "engines/test_fake",
    "serve/test_cluster.py",
    "sglang/test_serving.py::test_prefix_cache_changes_no_token_and_is_reported",
)
# They would begin last and be waited for, with nothing left to do beside them: they come first.
FIRST = ("tests/tools/parity/test_live.py", "tests/torchcuda/", "tests/weights/test_deaths.py")
TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="without the tests of SLOW, few examples")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without looking for garbage in what stays: that takes a third of the time."""
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


def is_slow(node_id: str) -> bool:
    name = node_id.removeprefix("tests/")
    slow = any(name == entry or name.startswith((f"{entry}/", f"{entry}::")) for entry in SLOW)
    return slow and not name.startswith(SAMPLES)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if " at 0x" in item.nodeid:  # processes of one run would collect other tests each
            raise pytest.UsageError(f"{item.nodeid} has an address for an id; give it another one")
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    if not config.getoption("--quick"):
        return
    slow = [item for item in items if is_slow(item.nodeid)]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not is_slow(item.nodeid)]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that have nothing for the quick tests are not even imported."""
    if not config.getoption("--quick") or not collection_path.is_relative_to(TESTS):
        return None
    name = str(collection_path.relative_to(TESTS))
    if any(sample.startswith(name) for sample in SAMPLES):
        return None
    return is_slow(name) or None


@pytest.fixture(scope="session")
def redis_server() -> Iterator[BundledRedis]:
    """A real server on a unix socket below a directory of its own; `.url` for clients.

    Tests share it: take a fresh `namespace`, and never stop or kill this one (start a
    `BundledRedis(short_dir)` of your own for that).
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
    """A directory whose path leaves room for unix sockets (pytest's tmp_path may not)."""
    with tempfile.TemporaryDirectory(prefix="prism-") as directory:
        yield Path(directory)
