"""GPUs of the test libcuda are shared by all processes: memory of each, also after its death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from .driver import MEGABYTE, PAGE, start_with
from .libcuda import LibCuda

CAPACITY = 64 * MEGABYTE
# Answers each line of Python that it reads.
SERVE = """
import json, socket
driver = Driver(libcuda, 0)
links = []

def listen(path):
    links.append(socket.socket(socket.AF_UNIX))
    links[-1].bind(path)
    links[-1].listen()

def give(path, handle):
    result, fd = driver.export(handle)
    assert result == 0, driver.refusal()
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        socket.send_fds(link, [b"x"], [fd])
    os.close(fd)

def take():
    with links[-1].accept()[0] as link:
        [fd] = socket.recv_fds(link, 1, 1)[1]
    taken = driver.take_in(fd)
    os.close(fd)
    return taken

def fork():
    ready, told = os.pipe()
    if (child := os.fork()) == 0:
        os.write(told, b"x")
        time.sleep(600)
    os.read(ready, 1)
    return child

for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
"""


class Process:
    """Process with a context on device 0 that evaluates the expressions that it reads."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def __call__(self, code: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(code + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def free_bytes(self) -> int:
        return int(self("driver.free_bytes()"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()  # not for its pipes, which a child of it may have
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def end(self) -> None:
        """Ends the process by itself, while it holds memory."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait() == 0


Start = Callable[..., Process]


@pytest.fixture
def start(libcuda: LibCuda, tmp_path: Path) -> Iterator[Start]:
    started = []

    def run(**env: str) -> Process:
        book = {"KVCACHED_TEST_CUDA_BOOK": str(tmp_path / "book")}
        started.append(Process(start_with(libcuda, SERVE, **book, **env)))
        assert started[-1]("'ready'") == "ready"
        return started[-1]

    yield run
    for process in started:
        process.kill()


def test_a_device_is_filled_by_all_its_processes(start: Start) -> None:
    first, second = start(), start()
    assert (first.free_bytes(), second.free_bytes()) == (CAPACITY, CAPACITY)
    [result, handle] = first(f"driver.create({CAPACITY - 2 * PAGE})")
    assert (result, second.free_bytes()) == (0, 2 * PAGE)
    assert second(f"driver.create({3 * PAGE})")[0] == LibCuda.OUT_OF_MEMORY
    assert "full" in second("driver.refusal()")
    assert second("driver.allocate(PAGE)")[0] == second("driver.create(PAGE)")[0] == 0
    assert first("driver.allocate(1)")[0] == LibCuda.OUT_OF_MEMORY
    assert (first.free_bytes(), second("libcuda.used_bytes()")) == (0, 2 * PAGE)
    assert second("driver.create(PAGE, device=1)")[0] == 0  # it has its own memory
    assert first(f"driver.release({handle})") == 0
    assert second.free_bytes() == CAPACITY - 2 * PAGE


@pytest.mark.parametrize("ends", [Process.kill, Process.end])
def test_what_a_process_leaves_is_given_back(start: Start, ends: Callable[[Process], None]) -> None:
    first, second = start(), start()
    assert first("driver.create(PAGE)")[0] == first("driver.allocate(PAGE)")[0] == 0
    assert second.free_bytes() == CAPACITY - 2 * PAGE
    ends(first)
    assert second.free_bytes() == CAPACITY
    assert second(f"driver.create({CAPACITY})")[0] == 0


def test_a_killed_processs_memory_takes_a_while(start: Start) -> None:
    """Frees it only after the time that the test has set. An hour shows that there is a wait."""
    slow = {"KVCACHED_TEST_CUDA_TEARDOWN_MS": "3600000"}
    first, second = start(**slow), start(**slow)
    assert first("driver.create(PAGE)")[0] == 0
    first.kill()
    assert second.free_bytes() == CAPACITY - PAGE
    assert second(f"driver.create({CAPACITY})")[0] == LibCuda.OUT_OF_MEMORY
    assert start().free_bytes() == CAPACITY  # it has no delay


def test_it_comes_back_after_that_while(start: Start) -> None:
    first, second = start(), start(KVCACHED_TEST_CUDA_TEARDOWN_MS="300")
    assert first("driver.create(PAGE)")[0] == 0
    first.kill()
    assert second.free_bytes() == CAPACITY - PAGE
    assert second("time.sleep(0.3)") is None
    assert second.free_bytes() == CAPACITY


def test_a_forked_child_holds_nothing(start: Start) -> None:
    first, second = start(), start()
    child = first("driver.create(PAGE) and fork()")
    try:
        first.kill()
        assert second.free_bytes() == CAPACITY
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_context_costs_memory(start: Start) -> None:
    cost = 20 * MEGABYTE
    heavy = {"KVCACHED_TEST_CUDA_CONTEXT_BYTES": str(cost)}
    first, second = start(**heavy), start(**heavy)
    assert (first("driver.free_bytes()"), second.free_bytes()) == (CAPACITY - 2 * cost,) * 2
    retain = "cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)"
    assert first(retain) == 0  # the same context
    assert first("libcuda.used_bytes()") == 0  # by allocations
    third = start()
    assert third("driver.create(PAGE)")[0] == 0
    assert second("cu.cuDevicePrimaryCtxRelease_v2(0)") == 0
    assert third.free_bytes() == CAPACITY - cost - PAGE
    assert third(f"driver.allocate({third.free_bytes()})")[0] == 0
    assert second(retain) == LibCuda.OUT_OF_MEMORY
    assert "context" in second("driver.refusal()")
    assert first("cu.cuDevicePrimaryCtxRelease_v2(0)") == 0
    assert third.free_bytes() == 0
    assert first("cu.cuDevicePrimaryCtxRelease_v2(0)") == 0
    assert third.free_bytes() == cost


def test_imported_memory_is_kept_until_its_last_user_drops_it(start: Start, tmp_path: Path) -> None:
    first, second, third = start(), start(), start()
    [result, handle] = first("driver.create(PAGE, handle_types=1)")
    assert result == 0
    imported = hand_over(first, second, handle, tmp_path)
    assert third.free_bytes() == CAPACITY - PAGE  # once, whichever process holds it
    assert first(f"driver.release({handle})") == 0
    assert third.free_bytes() == CAPACITY - PAGE
    assert second(f"driver.release({imported})") == 0
    assert third.free_bytes() == CAPACITY
    handle = first("driver.create(PAGE, handle_types=1)[1]")
    imported = hand_over(first, second, handle, tmp_path)
    first.kill()
    assert third.free_bytes() == CAPACITY - PAGE
    second.kill()
    assert third.free_bytes() == CAPACITY


def hand_over(giver: Process, taker: Process, handle: int, folder: Path) -> int:
    """Returns the taker's handle for the giver's memory."""
    path = str(folder / f"link-{handle}-{uuid4().hex[:8]}")
    assert taker(f"listen({path!r})") is None
    assert giver(f"give({path!r}, {handle})") is None
    result, taken = taker("take()")
    assert result == 0, taker("driver.refusal()")
    return int(taken)
