"""Processes of several containers on one ledger: each container has process 1 and its own pids."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvcached import Device

from .pid_namespace import lock_word, segment_of


class Container:
    """A process of pid_namespace.py; `pid` is its number outside."""

    def __init__(self, command: str, namespace: str) -> None:
        script = Path(__file__).parent / "pid_namespace.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), command, namespace],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        first = self.line()
        if not first.startswith("ready "):
            self.process.communicate()
            assert first == "refused"
            pytest.skip("this user may not make a pid namespace; run as root")
        self.pid = int(first.removeprefix("ready "))

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait(60)


@pytest.fixture
def holder(device: Device, namespace: str) -> Iterator[Container]:
    container = Container("hold", namespace)
    yield container
    container.process.kill()
    container.process.communicate()


@pytest.fixture
def waiter(device: Device, namespace: str) -> Iterator[Container]:
    container = Container("wait", namespace)
    yield container
    container.process.kill()
    container.process.communicate()


def test_the_death_of_a_waiter_leaves_the_lock_to_its_namesake(
    device: Device, namespace: str, waiter: Container, holder: Container
) -> None:
    """Covers two processes that are thread 1, the id that a robust mutex of pthreads uses."""
    segment = segment_of(namespace)
    holder.go_on()
    assert holder.line() == "holding as 1"
    held = lock_word(segment)
    waiter.go_on()
    while lock_word(segment) == held:  # until the waiter sleeps
        time.sleep(0.001)
    asleep = lock_word(segment)
    waiter.kill()
    with ThreadPoolExecutor() as pool:
        third = pool.submit(device.usage)
        time.sleep(0.5)
        assert not third.done()
        assert lock_word(segment) == asleep
        holder.go_on()
        assert third.result().reserved_bytes == 0


def test_a_holder_that_dies_in_another_namespace_is_found(
    device: Device, namespace: str, holder: Container
) -> None:
    segment = segment_of(namespace)
    holder.go_on()
    assert holder.line() == "holding as 1"
    holder.kill()
    started = time.monotonic()
    assert device.usage().reserved_bytes == 0
    assert time.monotonic() - started < 5
    assert lock_word(segment) == 0
