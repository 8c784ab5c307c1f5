"""The time from which a request counts: its TTFT, its SLO, its deadline."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from prism.frontend.app import create_app
from prism.frontend.http import connections
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import ids_of, make_config
from tests.frontend.scripted_agent import ScriptedAgent, answering
from tests.frontend.test_accepting import GET, asked, opened, run, server_of, turns_until


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns the readings of the clock of `connections`, which shows the last one."""
    shown = [1.0]
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: shown[-1]))
    return shown


def test_a_request_counts_from_its_accept(ticks: list[float]) -> None:
    """Counts from the accept even if the event loop reads late.

    The next request on the connection counts from its first byte.
    """

    async def ask() -> None:
        listener = opened("tcp", Path())
        async with server_of(listener) as server:
            client = socket.create_connection(listener.getsockname())
            client.sendall(GET)
            await turns_until(lambda: server.servers[0].is_beginning)  # type: ignore[attr-defined]
            ticks.append(5.0)  # what it did before it read
            client.setblocking(False)
            connection = await asyncio.open_connection(sock=client)
            head = await connection[0].readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert float(await connection[0].readexactly(20)) == 1.0
            ticks.append(9.0)  # idle
            assert await asked(*connection) == 9.0
            connection[1].close()

    run(ask)


def test_a_connection_without_a_request_does_not_count(ticks: list[float]) -> None:
    """Clients may open connections before they need them."""

    async def ask() -> None:
        listener = opened("tcp", Path())
        async with server_of(listener) as server:
            connection = await asyncio.open_connection(*listener.getsockname())
            await turns_until(lambda: len(server.server_state.connections) == 1)
            for _ in range(5):
                await asyncio.sleep(0)
            ticks.append(60.0)
            assert await asked(*connection) == 60.0
            connection[1].close()

    run(ask)


def test_deadlines_and_ttft_count_from_the_arrival(
    redis_server: BundledRedis, namespace: str, short_dir: Path, ticks: list[float]
) -> None:
    """Includes the time in which the body arrives."""
    config = make_config(redis_server.url, namespace, short_dir)
    ticks.append(time.monotonic() - 100)
    body = b'{"model": "base", "prompt": "x", "return_slo": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)

    async def ask() -> None:
        app = create_app(config, "f0")
        async with ScriptedAgent(config) as agent, app.router.lifespan_context(app):
            agent.script = answering([*ids_of("yes"), 0])
            listener = opened("tcp", Path())
            async with server_of(listener, app):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write(head + body[:9])
                await asyncio.sleep(0.05)
                ticks.append(time.monotonic())
                writer.write(body[9:])
                await reader.readuntil(b"\r\n\r\n")
                said = await reader.readuntil(b"}}}")
                writer.close()
            [request] = agent.seen
            assert request.arrival_unix_s < time.time() - 90
            assert b'"met":false' in said
            metrics = app.state.dispatcher._metrics.text("f0", ("prism_ttft_seconds_sum",))
            assert float(metrics.split()[-1]) > 90

    run(ask)
