"""Fixtures: a device per test, of which nothing may stay in /dev/shm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcached import Device, Layout, segment_path

from .compiling import build_libcuda
from .libcuda import LibCuda

PAGE = 64 << 10
CAPACITY = 64 << 20
# Tokens of 512 B a buffer: a block of 16 is 8 KiB, a page of 64 KiB holds 8 blocks.
TINY = Layout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32", block_tokens=16)
# SmolLM2-135M: a block of 12 KiB divides no page; 3 pages hold 16 blocks.
SMOL = Layout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="float32", block_tokens=16)


# Two clients, on one device or on two that reach each other: a test that takes `names`.
PAIRS = [("host:0", "host:0"), ("host:0", "host:1"), ("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")]
# For tests that pass on every backend: pytestmark = EVERY_DEVICE
EVERY_DEVICE = pytest.mark.parametrize("device_name", ["host:0", "cuda:0"])


@pytest.fixture(params=PAIRS, ids="-".join)
def names(request: pytest.FixtureRequest) -> tuple[str, str]:
    pair: tuple[str, str] = request.param
    return pair


@pytest.fixture(scope="session")
def libcuda() -> LibCuda:
    """Returns the test libcuda, which implements `cuda:N` from then on, in worker processes too."""
    path = build_libcuda()
    os.environ["KVCACHED_LIBCUDA"] = str(path)
    return LibCuda(path)


@pytest.fixture
def device_name() -> str:
    return "host:0"


@pytest.fixture
def device(namespace: str, device_name: str, libcuda: LibCuda) -> Iterator[Device]:
    opened = Device.open(device_name, capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace)
    yield opened
    opened.close()
    Device.unlink(namespace, device_name)
    assert not segment_path(device_name, namespace).exists()


Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn(namespace: str, device_name: str) -> Iterator[Spawn]:
    """Starts a command of worker.py on the test's device; ends what is left of it."""
    started: list[subprocess.Popen[str]] = []

    def start(command: str, *arguments: object) -> subprocess.Popen[str]:
        argv = [sys.executable, str(Path(__file__).parent / "worker.py"), command, namespace]
        process = subprocess.Popen(
            [*argv, device_name, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
