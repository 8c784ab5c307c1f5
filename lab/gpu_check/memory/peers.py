"""Separate processes for the probes.

python -m lab.gpu_check.memory.peers observe             answers each line with free bytes
python -m lab.gpu_check.memory.peers hold BYTES PAGE     holds BYTES in pages of PAGE
python -m lab.gpu_check.memory.peers pattern COUNT PAGE  fills pages and releases them
python -m lab.gpu_check.memory.peers write PAGE          writes to a read-only page
python -m lab.gpu_check.memory.peers hole PAGE           launches a graph over a hole
python -m lab.gpu_check.memory.peers share PATH COUNT PAGE  sends pages to a socket
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from lab.gpu_check.driver import POSIX_FILE, READ, Driver

ANSWER_S = 30.0
LOOK_S = 0.002
PATTERN = 0xA5


class Death(NamedTuple):
    """Seconds until a killed process was dead, and from then until its memory was back."""

    death_s: float
    back_s: float
    tries: int

    def facts(self) -> dict[str, float]:
        return {
            "death_ms": round(self.death_s * 1e3, 2),
            "granted_ms_after_death": round(self.back_s * 1e3, 2),
            "tries": self.tries,
        }


class Peer:
    """A separate process that answers in lines. It is killed at the end of the block."""

    def __init__(self, *arguments: str, module: str = "lab.gpu_check.memory.peers") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self, question: str = "", timeout_s: float = ANSWER_S) -> str:
        """Returns the next line of the process, after sending a question. Raises TimeoutError."""
        assert self.process.stdout is not None
        if question:
            self.send(question)
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise TimeoutError(f"{self.process.args!r} did not answer in {timeout_s:.0f} s")
        line = self.process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{self.process.args!r} ended with {self.process.wait(5)}")
        return line

    def send(self, question: str) -> None:
        """Sends a question without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{question}\n")
        self.process.stdin.flush()

    def kill(self) -> float:
        """Returns the seconds until the process is dead. Its memory may come back later."""
        began_s = time.monotonic()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(ANSWER_S)
        return time.monotonic() - began_s

    def kill_until(self, is_back: Callable[[], bool], limit_s: float) -> Death:
        """Kills the process and waits until its memory is back. Raises TimeoutError."""
        death_s, began_s, tries = self.kill(), time.monotonic(), 1
        while not is_back():
            tries += 1
            if time.monotonic() - began_s > limit_s:
                raise TimeoutError(f"a killed process still has memory after {limit_s:.0f} s")
            time.sleep(LOOK_S)
        return Death(death_s, time.monotonic() - began_s, tries)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Observer(Peer):
    """Process that tells free memory. It has a context from the start."""

    def __init__(self) -> None:
        super().__init__("observe")
        self.free_bytes()

    def free_bytes(self) -> int:
        return int(self.answer("free"))


def observe() -> None:
    driver = Driver.open()
    for _ in sys.stdin:
        print(driver.free_bytes(), flush=True)


def hold(size_bytes: int, page_bytes: int) -> None:
    """Holds mapped and written pages, as an engine does when it dies."""
    driver = Driver.open()
    address, _ = driver.map_pages(size_bytes // page_bytes, page_bytes)
    driver.fill(address, PATTERN, size_bytes)
    print("holding", flush=True)
    sys.stdin.read()


def pattern(pages: int, page_bytes: int) -> None:
    fill_and_remove(Driver.open(), pages, page_bytes)
    print("filled", flush=True)


def fill_and_remove(driver: Driver, pages: int, page_bytes: int) -> None:
    """Creates pages, fills them with a pattern and releases them."""
    address, handles = driver.map_pages(pages, page_bytes)
    driver.fill(address, PATTERN, pages * page_bytes)
    driver.remove_pages(address, handles, page_bytes)


def write(page_bytes: int) -> None:
    """Prints the results of the request for read-only access, of a write, and of later calls. The
    context may be lost, so that this needs a separate process."""
    driver = Driver.open()
    address, _ = driver.map_pages(1, page_bytes)
    driver.fill(address, 1, page_bytes)
    codes = [driver.allow_code(address, page_bytes, READ)]
    if codes == [0]:
        codes.append(_code(lambda: driver.fill(address, 2, page_bytes)))
        codes.append(driver.code("cuCtxSynchronize"))
        codes.append(_code(lambda: driver.read(address, 1)))
    print(*codes, flush=True)


def hole(page_bytes: int) -> None:
    """Prints the results of a graph over a page, then of its launch and end over a hole."""
    driver = Driver.open()
    stream, (address, _) = driver.stream(), driver.map_pages(1, page_bytes)
    driver.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), 0)
    driver.fill_behind(stream, address, 1, page_bytes)
    graph, program = ctypes.c_void_p(), ctypes.c_void_p()
    driver.call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
    driver.call("cuGraphInstantiateWithFlags", ctypes.byref(program), graph, ctypes.c_uint64(0))
    mapped = driver.code("cuGraphLaunch", program, ctypes.c_void_p(stream))
    mapped = mapped or driver.code("cuStreamSynchronize", ctypes.c_void_p(stream))
    driver.unmap(address, page_bytes)
    launch = driver.code("cuGraphLaunch", program, ctypes.c_void_p(stream))
    wait = driver.code("cuStreamSynchronize", ctypes.c_void_p(stream))
    print(mapped, launch, wait, flush=True)


def share(path: str, pages: int, page_bytes: int) -> None:
    """Creates pages that can be exported, sends their descriptors, and waits to be killed."""
    driver = Driver.open()
    files = [driver.export_file(driver.create(page_bytes, POSIX_FILE)) for _ in range(pages)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as there:
        there.connect(path)
        socket.send_fds(there, [b"pages"], files)
        for file in files:
            os.close(file)
        print("shared", flush=True)
        sys.stdin.read()


def _code(call: Callable[[], object]) -> int:
    from lab.gpu_check.driver import DriverError

    try:
        call()
    except DriverError as error:
        return error.code
    return 0


def main(command: str, *arguments: str) -> None:
    if command == "share":
        share(arguments[0], int(arguments[1]), int(arguments[2]))
    else:
        commands: dict[str, Callable[..., None]] = {
            "observe": observe,
            "hold": hold,
            "pattern": pattern,
            "write": write,
            "hole": hole,
        }
        commands[command](*map(int, arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
