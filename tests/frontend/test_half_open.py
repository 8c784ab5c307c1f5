"""Clients that connect and send nothing, or half of a request, over raw sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.datastructures import State

from prism.config.schema.cluster_config import ClusterConfig
from prism.frontend.__main__ import UvicornServer
from prism.frontend.app import create_app
from prism.frontend.http.connections import HEAD_BYTES_MAX, PIPELINED_MAX, guarded_protocol
from prism.frontend.protocol import bodies
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import make_config
from tests.frontend.test_faults import until

PATIENCE_S = 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> bytes:
        """Returns an answer's headers."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def rest(self) -> bytes:
        """Returns all bytes until the server closes the connection."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()


@dataclass
class Guarded:
    port: int
    state: State
    opened: list[Connection]

    async def connect(self, first: bytes = b"") -> Connection:
        connection = Connection(*await asyncio.open_connection("127.0.0.1", self.port))
        self.opened.append(connection)
        await connection.send(first)
        return connection

    async def serves(self) -> bool:
        connection = await self.connect(MODELS)
        return (await connection.answer()).startswith(b"HTTP/1.1 200")


@pytest.fixture
def app_config(redis_server: BundledRedis, namespace: str, short_dir: Path) -> ClusterConfig:
    return make_config(redis_server.url, namespace, short_dir)


@asynccontextmanager
async def guarded(
    config: ClusterConfig,
    connections_max: int,
    head_timeout_s: float,
    write_timeout_s: float = PATIENCE_S,
) -> AsyncIterator[Guarded]:
    app = create_app(config, "f0")
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    protocol = guarded_protocol(connections_max, head_timeout_s, write_timeout_s)
    server = UvicornServer(uvicorn.Config(app, http=protocol, log_config=None, lifespan="off"))
    async with app.router.lifespan_context(app):
        task = asyncio.create_task(server.serve(sockets=[listener]))
        made = Guarded(listener.getsockname()[1], app.state, [])
        try:
            yield made
        finally:
            for connection in made.opened:
                connection.writer.close()
            server.should_exit = True
            await task


@pytest.mark.parametrize(
    "sent",
    [b"", MODELS[:20], HEAD[:30], MODELS + MODELS[:20]],
    ids=["nothing", "get", "post", "second"],
)
async def test_headers_have_a_deadline(app_config: ClusterConfig, sent: bytes) -> None:
    async with guarded(app_config, 100, 0.2) as this:
        connection = await this.connect(sent)
        assert (await connection.rest()).count(b"HTTP/1.1") == sent.count(b"\r\n\r\n")
        assert await this.serves()


async def test_headers_have_a_size(app_config: ClusterConfig) -> None:
    async with guarded(app_config, 100, PATIENCE_S) as this:
        field = b"X-Flood: %s\r\n" % (b"x" * 1000)
        flood = MODELS[:-2] + field * (HEAD_BYTES_MAX // len(field) + 1)
        # Not a byte more than is read before the answer: the rest would reset the connection.
        connection = await this.connect(flood[: HEAD_BYTES_MAX + 1])
        assert b" 431 " in await connection.answer()
        assert await this.serves()


async def is_cut_off(connection: Connection, flood: bytes) -> bool:
    """Returns whether the server closes without another answer, which would corrupt the current
    one."""
    try:
        await connection.send(flood)
        return await connection.rest() == b""
    except ConnectionError:
        return True


async def test_headers_have_a_size_while_a_request_is_served(app_config: ClusterConfig) -> None:
    """Limits the headers of the next request and the trailers of a body."""
    field = b"X-Flood: %s\r\n" % (b"x" * 1000)
    flood = field * (4 * HEAD_BYTES_MAX // len(field))
    body = b'{"model": "base", "prompt": "x"}'
    chunked = HEAD.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked")
    async with guarded(app_config, 100, PATIENCE_S) as this:
        served = await this.connect(HEAD % len(body) + body)
        await until(lambda: len(this.state.dispatcher.log) == 1)
        assert await is_cut_off(served, MODELS[:-2] + flood)
        await until(lambda: not len(this.state.dispatcher.log))
        unfinished = await this.connect(chunked + b"%x\r\n%s\r\n" % (len(body), body))
        assert await is_cut_off(unfinished, b"0\r\n" + flood)
        # Many more bytes in small chunks of a body do not count as headers.
        whole = await this.connect(chunked)
        piece = b"400\r\n%s\r\n" % (b" " * 1024)
        for _ in range(200):
            await whole.send(piece)
        await whole.send(b"1\r\nx\r\n0\r\n\r\n")
        assert (await whole.answer()).startswith(b"HTTP/1.1 400")


async def drip(connection: Connection) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await connection.send(b"G")
            await asyncio.sleep(0.05)


async def test_a_byte_now_and_then_moves_no_deadline(app_config: ClusterConfig) -> None:
    async with guarded(app_config, 100, 0.5) as this:
        connection = await this.connect()
        with pytest.raises(ConnectionError):
            await drip(connection)


async def test_idle_connections_are_kept(app_config: ClusterConfig) -> None:
    """Starts the time for the next request's headers at their first byte."""
    async with guarded(app_config, 100, 0.1) as this:
        connection = await this.connect(MODELS)
        await connection.reader.readuntil(b"]}")
        await asyncio.sleep(0.4)
        await connection.send(MODELS)
        assert (await connection.answer()).startswith(b"HTTP/1.1 200")


async def test_a_body_has_a_deadline(
    app_config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.2)
    async with guarded(app_config, 100, 30) as this:
        connection = await this.connect(HEAD % 99 + b"{")
        answer = await connection.rest()
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"send it faster" in answer


async def test_half_open_connections_make_room(app_config: ClusterConfig) -> None:
    """Closes the oldest connections when three times as many arrive as there is room for."""
    async with guarded(app_config, 20, 30) as this:
        half = [await this.connect(MODELS[:20]) for _ in range(60)]
        assert await this.serves()
        for connection in half[:40]:
            assert await connection.rest() == b""
        await half[-1].send(MODELS[20:])
        assert (await half[-1].answer()).startswith(b"HTTP/1.1 200")


async def test_unfinished_bodies_make_room(app_config: ClusterConfig) -> None:
    async with guarded(app_config, 20, 30) as this:
        for _ in range(40):
            await this.connect(HEAD % 99 + b"{")
        assert await this.serves()


async def test_served_connections_are_not_closed_for_new_ones(app_config: ClusterConfig) -> None:
    body = b'{"model": "base", "prompt": "x"}'
    async with guarded(app_config, 2, 30) as this:
        served = [await this.connect(HEAD % len(body) + body) for _ in range(2)]
        await until(lambda: len(this.state.dispatcher.log) == 2)
        extra = await this.connect(MODELS)
        assert (await extra.answer()).startswith(b"HTTP/1.1 503")
        for connection in served:
            assert not connection.reader.at_eof()


async def test_pipelined_requests_have_a_bound(app_config: ClusterConfig) -> None:
    """Answers the requests within the bound; one read may contain thousands."""
    body = b'{"model": "base", "prompt": "x"}'
    async with guarded(app_config, 100, 30) as this:
        few = await this.connect(MODELS * (PIPELINED_MAX + 1))
        for _ in range(PIPELINED_MAX + 1):
            assert (await few.answer()).startswith(b"HTTP/1.1 200")
            await few.reader.readuntil(b"]}")
        many = await this.connect(MODELS * 500 + HEAD % len(body) + body)
        assert (await many.rest()).count(b"HTTP/1.1 200") == PIPELINED_MAX + 1
        flood = await this.connect(HEAD % len(body) + body)
        await until(lambda: len(this.state.dispatcher.log) == 1)
        await flood.send(MODELS * 500)
        await flood.send(HEAD % len(body) + body)
        await asyncio.sleep(0.1)
        assert len(this.state.dispatcher.log) == 1
        flood.writer.close()
        await until(lambda: not len(this.state.dispatcher.log))
        assert await this.serves()


async def test_who_leaves_with_a_request_behind_it_has_left(app_config: ClusterConfig) -> None:
    body = b'{"model": "base", "prompt": "x"}'
    async with guarded(app_config, 100, 30) as this:
        connection = await this.connect(HEAD % len(body) + body + MODELS)
        await until(lambda: len(this.state.dispatcher.log) == 1)
        connection.writer.close()
        await until(lambda: not len(this.state.dispatcher.log))


async def test_a_body_behind_its_answer_is_no_headers(app_config: ClusterConfig) -> None:
    size = 4 * HEAD_BYTES_MAX
    async with guarded(app_config, 100, 30) as this:
        head = (HEAD % size).replace(b"/v1/completions", b"/nowhere")
        connection = await this.connect(head)
        assert (await connection.answer()).startswith(b"HTTP/1.1 404")
        await connection.send(b"x" * size + MODELS)
        answer = await connection.reader.readuntil(b"]}")
        assert b"HTTP/1.1 200" in answer


async def test_memory_for_bodies_is_bounded(
    app_config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepts small bodies always, and large ones again when the others have gone."""
    monkeypatch.setattr(bodies, "BODIES_BYTES_MAX", 300_000)
    large, small = HEAD % 500_000 + b" " * 200_000, b'{"model": "base"}'
    async with guarded(app_config, 100, 30) as this:
        first = await this.connect(large)
        await until(lambda: bodies.memory.used_bytes >= 100_000)
        second = await this.connect(large + b" " * 200_000)
        assert (await second.answer()).startswith(b"HTTP/1.1 429")
        third = await this.connect(HEAD % len(small) + small)
        assert (await third.answer()).startswith(b"HTTP/1.1 400")
        first.writer.close()
        await until(lambda: not bodies.memory.used_bytes)


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_does_not_read_has_a_deadline(reads: bool) -> None:
    """Clients that read have no deadline, however long the answer is."""
    gone = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        watching = asyncio.create_task(watch())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.is_set():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        await watching

    listener = socket.create_server(("127.0.0.1", 0))
    protocol = guarded_protocol(100, write_timeout_s=1.0)
    server = UvicornServer(uvicorn.Config(endless, http=protocol, log_config=None, lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
    try:
        writer.write(MODELS)
        if reads:
            for _ in range(500):
                await reader.readexactly(1 << 16)
            assert not gone.is_set()
            writer.close()
        await asyncio.wait_for(gone.wait(), PATIENCE_S)
    finally:
        writer.close()
        server.should_exit = True
        await task


@pytest.mark.parametrize("how", ["Content-Length: %d", "Transfer-Encoding: chunked"])
async def test_a_client_reads_that_its_body_is_too_large(
    app_config: ClusterConfig, how: str
) -> None:
    """Answers 413 to a client that sends all of the body first, instead of a reset connection."""
    size = 24 << 20
    head = HEAD.replace(b"Content-Length: %d", how.replace("%d", str(size)).encode())
    begin, end = (b"%x\r\n" % size, b"\r\n0\r\n\r\n") if "chunked" in how else (b"", b"")
    async with guarded(app_config, 100, PATIENCE_S) as this:
        connection = await this.connect(head + begin + b" " * size + end)
        assert b" 413 " in await connection.answer()
        assert b"the body exceeds 8 MiB" in await connection.rest()
        assert await this.serves()


async def test_a_client_that_asks_first_sends_no_body_that_is_too_large(
    app_config: ClusterConfig,
) -> None:
    head = HEAD[:-2] % (24 << 20) + b"Expect: 100-continue\r\n\r\n"
    async with guarded(app_config, 100, PATIENCE_S) as this:
        connection = await this.connect(head)
        assert (await connection.answer()).startswith(b"HTTP/1.1 413")
        assert b"the body exceeds 8 MiB" in await connection.rest()


async def test_a_body_without_an_end_is_discarded_for_some_time_alone(
    app_config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_DISCARD_TIMEOUT_S", 0.2)
    async with guarded(app_config, 100, PATIENCE_S) as this:
        connection = await this.connect(HEAD % (24 << 20) + b" " * 1000)
        assert b" 413 " in await connection.answer()
        assert b"the body exceeds 8 MiB" in await connection.rest()
        assert bodies.memory.used_bytes == 0
