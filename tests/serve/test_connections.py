"""Connections to a cluster: thousands at once, and none that waits to fill a packet."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from prism.process import raise_file_limit
from prism.queueing.server import BundledRedis
from tests.serve.conftest import Cluster, descendants, serving

STREAMS, TOKENS = 2000, 16
PIDFD_GETFD = 438  # the number of the system call, on every architecture


def body_of(tokens: int, number: int) -> bytes:
    asked = {"model": "a", "prompt": [9, 8, 7, 3 + number % 200], "max_tokens": tokens}
    return json.dumps({**asked, "stream": True, "ignore_eos": True}).encode()


async def stream(cluster: Cluster, number: int, all_open: asyncio.Barrier) -> bytes:
    """Returns the whole answer of one stream.

    The request is sent when all connections are open, and the answer is read when all have begun.
    """
    place = urlsplit(cluster.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 20)
    body = body_of(TOKENS, number)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    await all_open.wait()
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    first = await reader.readuntil(b"data: ")
    await all_open.wait()
    rest = await reader.read(-1)
    writer.close()
    return first + rest


@contextmanager
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_file_limit()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_two_thousand_streams_at_once_are_all_whole(tmp_path: Path, short_dir: Path) -> None:
    devices = [{"name": "host:0", "capacity": "64MiB", "page": "64KiB", "engines": 1}]
    engine = {"adapter": "fake", "static": "1MiB", "max_running": STREAMS}
    fake = json.dumps({"decode_step_ms": 100})

    async def all_of_them() -> list[bytes]:
        barrier = asyncio.Barrier(STREAMS)
        return await asyncio.gather(*(stream(cluster, n, barrier) for n in range(STREAMS)))

    with (
        many_files(),
        serving(tmp_path, short_dir, fake, devices=devices, engine=engine) as cluster,
    ):
        answers = asyncio.run(all_of_them())
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 200 "), answer[:300]
        events = [line for line in answer.splitlines() if line.startswith(b"data: {")]
        shown = [json.loads(line.removeprefix(b"data: ")) for line in events]
        assert shown[-1]["choices"][0]["finish_reason"] == "length"
        assert b"data: [DONE]" in answer


def tcp_sockets(pid: int) -> Iterator[socket.socket]:
    """Copies of a process's TCP connections, options included."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if not os.readlink(file).startswith("socket:"):
                    continue
            copy = libc.syscall(PIDFD_GETFD, process, int(file.name), 0)
            if copy < 0:  # it was closed meanwhile
                continue
            with socket.socket(fileno=copy) as found:
                is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and found.type == socket.SOCK_STREAM:
                    yield found
    finally:
        os.close(process)


def delays(pid: int, ports: dict[int | None, str]) -> dict[tuple[str, int], bool]:
    """Returns (peer, pid) -> whether small writes wait, of a process's open connections."""
    found: dict[tuple[str, int], bool] = {}
    for connection in tcp_sockets(pid):
        with suppress(OSError):  # a peer has just left
            ends = connection.getsockname()[1], connection.getpeername()[1]
            (name,) = {ports[end] for end in ends if end in ports}
            flag = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            found[name, pid] = not flag or found.get((name, pid), False)
    return found


def test_no_connection_waits_to_fill_a_packet(tmp_path: Path, short_dir: Path) -> None:
    """Checks connections of frontends, agents, scheduler and Redis. The others do not use TCP."""
    folder = tmp_path / "redis"
    folder.mkdir()
    with (
        BundledRedis(folder, port=0) as redis,
        serving(tmp_path, short_dir, redis=redis.url) as cluster,
    ):
        place = urlsplit(cluster.url)
        with socket.create_connection((place.hostname, place.port)) as client:
            client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            ports = {place.port: "client", redis.port: "redis"}
            assert redis.pid is not None
            seen: dict[tuple[str, int], bool] = {}
            for pid in (*descendants(cluster.process.pid), redis.pid):
                seen |= delays(pid, ports)
    whose = Counter(name for name, _ in seen)
    assert whose["client"] == 1
    assert whose["redis"] >= 4  # frontend, agent, scheduler, and the server itself
    assert not any(seen.values()), seen
