"""Sockets, pipes and socket pairs: the peers that they accept, and their handling of malformed
data."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from prism.agent.engines.fork_supervisor import ForkServerClient
from prism.engines.processes import forkserver
from prism.engines.ranks import group
from prism.engines.ranks.group import RankGroup
from prism.engines.ranks.orders import Vote
from prism.errors import RankLostError
from prism.messages.forking import EngineForked
from prism.messages.requests import Cancel
from prism.transport import malformed_total
from tests.strangers import as_nobody, needs_root
from tests.test_transport import Sockets

GREETING = b"\xff"  # the first byte of ZeroMQ's protocol, which both ends send at once


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made = Sockets()
    yield made
    made.close()


def greeted(path: Path) -> bool:
    """Returns whether the listener greets this process and does not close the connection."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(30)
        link.connect(str(path))
        try:
            return link.recv(1) == GREETING
        except ConnectionResetError:
            return False


@needs_root
@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.PULL])
async def test_a_peer_of_another_user_is_hung_up_on(
    sockets: Sockets, short_dir: Path, kind: int
) -> None:
    path = short_dir / "socket"
    sockets.channel(kind, Cancel).bind(f"ipc://{path}")
    os.chmod(short_dir, 0o755)
    os.chmod(path, 0o777)
    assert greeted(path)
    assert not as_nobody(lambda: greeted(path))
    assert greeted(path)


@needs_root
async def test_the_directory_keeps_other_users_out(sockets: Sockets, short_dir: Path) -> None:
    path = short_dir / "socket"
    sockets.channel(zmq.PULL, Cancel).bind(f"ipc://{path}")
    os.chmod(path, 0o777)

    def reached() -> bool:
        try:
            return greeted(path)
        except PermissionError:
            return False

    assert reached()
    assert not as_nobody(reached)


async def test_a_socket_whose_file_was_removed_is_bound_again(
    sockets: Sockets, short_dir: Path
) -> None:
    folder = short_dir / "run"
    folder.mkdir()
    endpoint = f"ipc://{folder}/socket"
    channel = sockets.channel(zmq.PULL, Cancel)
    channel.bind(endpoint)
    old = sockets.channel(zmq.PUSH)
    old.connect(endpoint)
    old.send(Cancel(["1"]))
    assert await channel.receive() == (b"", Cancel(["1"]))
    (folder / "socket").unlink()
    folder.rmdir()
    old.send(Cancel(["2"]))
    assert await channel.receive() == (b"", Cancel(["2"]))
    folder.mkdir()
    new = sockets.channel(zmq.PUSH)
    new.connect(endpoint)
    new.send(Cancel(["3"]))
    async with asyncio.timeout(60):
        assert await channel.receive() == (b"", Cancel(["3"]))
    old.send(Cancel(["4"]))
    assert await channel.receive() == (b"", Cancel(["4"]))
    channel.close()
    (folder / "socket").unlink()
    await asyncio.sleep(0)
    assert not (folder / "socket").exists()


# --- an agent and its fork server ----------------------------------------------------------------

GOOD = msgspec.json.encode(EngineForked("e0", 7))
ECHO = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"


@pytest.mark.parametrize(
    ("nonsense", "lines"),
    [
        (b"\n", 1),
        (b"{}\n[1]\n\xff\xfe\n", 3),
        (b"[" * 50_000 + b"\n", 1),
        (b'{"type":"EngineForked","engine_id":7}\n', 1),
        (b"x" * 1_000_000 + b"\n", 1),
    ],
)
async def test_nonsense_of_a_fork_server_is_counted(nonsense: bytes, lines: int) -> None:
    before = malformed_total()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ECHO, stdin=PIPE, stdout=PIPE
    )
    client = ForkServerClient(process)
    assert process.stdin is not None
    process.stdin.write(nonsense + GOOD + b"\n")
    process.stdin.close()
    assert await client.event() == EngineForked("e0", 7)
    assert await client.event() is None
    assert malformed_total() - before >= lines
    await process.wait()


def test_a_line_without_an_end_takes_no_memory() -> None:
    reading, writing = os.pipe()
    lines = forkserver.PipeLines(reading)
    for _ in range(100):
        os.write(writing, b"x" * 65536)
        assert lines.read() == []
    assert len(lines._rest) == forkserver.LINE_BYTES_MAX
    os.write(writing, b"\ngood\n")
    assert lines.read()[-1] == b"good"
    os.close(reading)
    os.close(writing)


# --- the ranks of an engine ----------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[RankGroup, socket.socket]]:
    """Yields rank 0 and the other end of its socket."""
    ours, theirs = socket.socketpair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        yield RankGroup(0, 2, [ours]), theirs


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(8, "little") + payload


@pytest.mark.parametrize(
    "nonsense",
    [
        framed(b""),
        framed(b"\xc1"),
        framed(b"\x91" * 100_000),
        framed(msgspec.msgpack.encode({"type": "Vote", "value": "x"})),
        framed(msgspec.msgpack.encode({"type": "Shutdown"})),
        b"\xff" * 8,
        (group.ENGINE_MESSAGE_BYTES_MAX + 1).to_bytes(8, "little"),
    ],
)
def test_nonsense_of_a_rank_ends_the_engine_by_name(
    pair: tuple[RankGroup, socket.socket], nonsense: bytes
) -> None:
    ranks, other = pair
    other.sendall(nonsense)
    with pytest.raises(RankLostError, match="rank 1 is out of step"):
        ranks.gather(Vote)
