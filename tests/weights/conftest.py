"""A small checkpoint, a separate store and a device for each test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcached import Client, Device, WeightStore

from .models import save_model

PAGE = 64 << 10
CAPACITY = 64 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Returns a directory with two safetensors files."""
    return save_model(tmp_path / "model")


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore.open(tmp_path / "store", max_bytes=64 << 20)


@pytest.fixture
def device(namespace: str) -> Iterator[Device]:
    opened = Device.open("host:0", capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace)
    yield opened
    Device.unlink(namespace, "host:0", force=True)


@pytest.fixture
def client(device: Device) -> Iterator[Client]:
    with device.client("engine") as opened:
        yield opened


Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn(tmp_path: Path, namespace: str) -> Iterator[Spawn]:
    """Starts a command of worker.py on the test's store and device; ends what is left of it."""
    started: list[subprocess.Popen[str]] = []

    def start(command: str, *arguments: object) -> subprocess.Popen[str]:
        program = str(Path(__file__).parent / "worker.py")
        process = subprocess.Popen(
            [sys.executable, program, command, str(tmp_path), namespace, *map(str, arguments)],
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
