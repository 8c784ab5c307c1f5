"""Bursts of connections, a lack of descriptors, and successors on the same socket."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop

from prism.frontend.__main__ import AcceptingLoop, UvicornServer
from prism.frontend.http.accepting import ACCEPTED_PER_TURN
from prism.frontend.http.connections import guarded_protocol
from tests.frontend.test_tls import make_certificate

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
TURNS_MAX = 1000


async def arrival(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the request's `arrived_s` if its protocol has one."""
    said = str(scope["state"].get("arrived_s", 1.0)).encode().rjust(20)
    headers = [(b"content-length", b"20")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": said})


@asynccontextmanager
async def server_of(
    listener: socket.socket, app: Any = arrival, **more: Any
) -> AsyncIterator[UvicornServer]:
    protocol = guarded_protocol(10_000)
    options = {"http": protocol, "log_config": None, "lifespan": "off", **more}
    server = UvicornServer(uvicorn.Config(app, **options))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await turns_until(lambda: server.started)
    try:
        yield server
    finally:
        server.should_exit = True
        await task


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    uvloop.run(bounded(), loop_factory=AcceptingLoop)


def opened(kind: str, folder: Path) -> socket.socket:
    if kind == "tcp":
        return socket.create_server(("127.0.0.1", 0), backlog=512)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(512)
    return listener


async def turns_until(done: Callable[[], bool]) -> int:
    """Returns the number of turns of the event loop until `done`."""
    for turn in range(TURNS_MAX):
        if done():
            return turn
        await asyncio.sleep(0)
    raise AssertionError("it never was")


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    writer.write(GET)
    await reader.readuntil(b"\r\n\r\n")
    return float(await reader.readexactly(20))


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_burst_takes_few_turns(kind: str, short_dir: Path) -> None:
    """Accepts several connections in each turn, where uvloop's own server accepts one."""
    count = 4 * ACCEPTED_PER_TURN

    async def burst() -> None:
        listener = opened(kind, short_dir)
        async with server_of(listener) as server:
            clients = [socket.socket(listener.family) for _ in range(count)]
            for client in clients:
                client.connect(listener.getsockname())
                client.sendall(GET)
            turns = await turns_until(lambda: len(server.server_state.connections) == count)
            assert turns < count / 8
            for client in clients:
                client.settimeout(20)
                assert (await asyncio.to_thread(client.recv, 15)) == b"HTTP/1.1 200 OK"
                client.close()

    run(burst)


def test_frontends_that_share_a_listener_share_a_burst() -> None:
    """Frontends accept a part of the burst in each turn and leave the rest to the others."""

    async def burst() -> None:
        listener = opened("tcp", Path())
        address = listener.getsockname()
        async with server_of(listener.dup()) as one, server_of(listener) as other:
            clients = [socket.create_connection(address) for _ in range(200)]
            states = one.server_state, other.server_state
            await turns_until(lambda: sum(len(each.connections) for each in states) == 200)
            assert min(len(each.connections) for each in states) >= ACCEPTED_PER_TURN
            for client in clients:
                client.close()

    run(burst)


class FailingListener(socket.socket):
    """Listener whose first accepts fail with `errors`."""

    errors: list[int]
    accepts = 0

    def accept(self) -> Any:
        self.accepts += 1
        if self.errors:
            raise OSError(number := self.errors.pop(0), errno.errorcode[number])
        return super().accept()


def test_a_lack_of_descriptors_leaves_clients_waiting(caplog: pytest.LogCaptureFixture) -> None:
    """Warns once and does not spin; skips a connection that its client has closed."""

    async def lack() -> None:
        listener = FailingListener(fileno=opened("tcp", Path()).detach())
        listener.errors = [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED]
        async with server_of(listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            assert await asked(reader, writer) > 0
            # Three that failed, the client's, and one that found no more.
            assert listener.accepts == 5
            writer.close()

    with caplog.at_level(logging.WARNING, "prism.frontend.http.accepting"):
        run(lack)
    [said] = [each for each in caplog.records if each.name == "prism.frontend.http.accepting"]
    assert "EMFILE" in said.getMessage()


def test_a_server_that_leaves_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serves the connections that it accepted; its successor on the socket accepts the others."""

    async def replaced() -> None:
        listener = opened("tcp", Path())
        address = listener.getsockname()
        async with server_of(listener.dup()) as one:
            kept = await asyncio.open_connection(*address)
            await asked(*kept)
            for each in one.servers:
                each.close()
            late = await asyncio.open_connection(*address)
            assert await asked(*kept) > 0
            async with server_of(listener) as other:
                assert await asked(*late) > 0
                assert len(one.server_state.connections) == 1
                assert len(other.server_state.connections) == 1
                late[1].close()
            kept[1].close()

    run(replaced)


def test_tls(tmp_path: Path) -> None:
    """Clients that abort the handshake or do not use TLS do not delay others."""
    certificate, key = make_certificate(tmp_path, "-nodes")
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False

    async def encrypted() -> None:
        listener = opened("tcp", Path())
        address = listener.getsockname()
        async with server_of(listener, ssl_certfile=certificate, ssl_keyfile=key) as server:
            plain = await asyncio.open_connection(*address)
            plain[1].write(GET)
            gone = await asyncio.open_connection(*address)
            await turns_until(lambda: server.servers[0].is_beginning)  # type: ignore[attr-defined]
            gone[1].close()
            for _ in range(3):
                reader, writer = await asyncio.open_connection(*address, ssl=context)
                assert await asked(reader, writer) > 0
                writer.close()
            await plain[0].read()
            plain[1].close()
            while server.servers[0].is_beginning:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)

    run(encrypted)
