"""Both ends of a hand-over, for its tests."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcached import Device, Layout, errors
from kvcached.handover import wire

from .conftest import CAPACITY, PAGE, TINY
from .handover_source import fill

COMMAND = [sys.executable, "-m", "tests.kvcached.handover_source"]


def soon(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.005)


class Ends:
    """A cache that offers and one that fetches, on devices of a namespace, in this process."""

    def __init__(self, namespace: str, names: tuple[str, str], layout: Layout = TINY) -> None:
        self.devices = {
            name: Device.open(name, capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace)
            for name in set(names)
        }
        self.names, self.namespace = names, namespace
        self.clients = [
            self.devices[name].client(role, background=False)
            for name, role in zip(names, ("source", "target"), strict=True)
        ]
        tokens = (2000, 5000)  # different sizes, so that buffers are at different offsets
        self.source, self.target = (
            client.alloc_kvcache(layout, n) for client, n in zip(self.clients, tokens, strict=True)
        )

    def charged(self) -> list[int]:
        return [client.usage().committed_bytes for client in self.clients]

    def close(self) -> None:
        for client, kv in zip(self.clients, (self.source, self.target), strict=True):
            client.free_kvcache(kv)
            client.close()
        for name, device in self.devices.items():
            assert device.usage().reserved_bytes == 0
            device.close()
            Device.unlink(self.namespace, name)


def open_files() -> int:
    """Counts the files that a hand-over may leave open: sockets, selectors and others' memory."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            count += target.startswith(("socket:", "anon_inode:", "/memfd:"))
    return count


def offered(ends: Ends, count: int = 40) -> NDArray[np.int64]:
    """Allocates blocks of the source, in random order, and fills them."""
    ids = ends.source.alloc_kv(count)
    assert ids is not None
    ids = np.random.default_rng(5).permutation(ids)
    fill(ends.source, ids)
    return ids


def taken(ends: Ends, count: int = 40) -> NDArray[np.int64]:
    """Allocates blocks of the target, at other places than the source's."""
    ids = ends.target.alloc_kv(count + 13)
    assert ids is not None
    ends.target.free_kv(ids[3:16])
    return np.random.default_rng(6).permutation(np.concatenate((ids[:3], ids[16:])))


def connect(name: str) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(20)
    link.connect(f"\0{name}")
    return link


def say(link: socket.socket, payload: bytes, files: Sequence[int] = ()) -> None:
    wire.send(link, payload, time.monotonic() + 20, files)


def hear(link: socket.socket, files_max: int = 0) -> tuple[bytes, list[int]]:
    return wire.receive(link, time.monotonic() + 20, files_max)


class Source:
    """Process that offers blocks and takes commands by lines."""

    def __init__(self, namespace: str, device: str, blocks: int, **env: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "serve", namespace, device, str(blocks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
            cwd=Path(__file__).parent.parent.parent,
        )
        self.namespace, self.name = namespace, device

    def line(self, command: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        with contextlib.suppress(errors.DeviceBusyError):  # the target's, too
            Device.unlink(self.namespace, self.name)
