"""`python -m prism.frontend --config RUN/cluster.json --frontend-id f0`: one frontend process.

SIGTERM and SIGINT drain: new requests get 503, and open requests finish or fail with an error when
the drain's time is over. The process then exits with 0. A second signal ends the drain at once.

SIGUSR1 hands over to a successor on the same socket: no new connections are accepted. Open
connections are served to the end of a request and are then closed with `Connection: close`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import signal
import socket
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
import uvloop
from fastapi import FastAPI

from prism.config.resolved import ConfigFile
from prism.config.schema.cluster_config import ClusterConfig, FrontendConfig
from prism.errors import ConfigError
from prism.frontend.app import create_admin, create_app
from prism.frontend.dispatch.dispatcher import Dispatcher
from prism.frontend.http.accepting import Acceptor
from prism.frontend.http.connections import guarded_protocol
from prism.frontend.http.in_flight import InFlight
from prism.frontend.http.listener import open_admin, open_listener
from prism.process import beat, configure_logging, die_with_parent, raise_file_limit

HANDSHAKE_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 3
# Longer than clients keep idle connections, so that none sends to a connection that is closing.
_KEEP_ALIVE_S = 75
_OTHER_FILES = 256
_OPERATORS_MAX = 64  # connections to `frontend.admin`, included in _OTHER_FILES
_IDLE_S = 5.0
_POLL_S = 0.1


class Admin(NamedTuple):
    """Application of the operators' pages and its listener."""

    app: FastAPI
    listener: socket.socket


class AcceptingLoop(uvloop.Loop):
    """uvloop whose servers accept many connections in a turn of the loop.

    A TLS handshake may take HANDSHAKE_TIMEOUT_S. uvicorn has no options for either. Servers must be
    created with `sock`.
    """

    async def create_server(self, *args: Any, **more: Any) -> Any:
        (protocols,) = args
        return Acceptor(protocols, more["sock"], more["ssl"], HANDSHAKE_TIMEOUT_S)


class UvicornServer(uvicorn.Server):
    """uvicorn server without signal handling: listeners must stay open until the drain."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def main() -> int:
    arguments = _arguments()
    die_with_parent()
    configure_logging()
    raise_file_limit()
    try:
        file = ConfigFile(arguments.config)
        config = file.config
        listener = _listener(config, arguments.listen_fd)
        app = create_app(config, arguments.frontend_id, arguments.without_unreadable, file)
        admin = _admin(app, config, arguments.admin_fd)
        serving = serve(app, listener, config.frontend, admin)
        ended_in_order = uvloop.run(serving, loop_factory=AcceptingLoop)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if ended_in_order else 1


async def serve(
    app: FastAPI,
    listener: socket.socket,
    tls: FrontendConfig | None = None,
    admin: Admin | None = None,
) -> bool:
    """Serves on `listener` and on that of `admin` until a signal, then drains.

    Returns False, without a drain, if the dispatcher failed: a new process must take over.
    Raises ConfigError.
    """
    beating = asyncio.create_task(beat())
    tls = tls or FrontendConfig()
    servers = [_server(app, tls, _connections_max())]
    listeners = [listener]
    if admin is not None:
        is_local = admin.listener.family == socket.AF_UNIX
        servers.append(_server(admin.app, FrontendConfig() if is_local else tls, _OPERATORS_MAX))
        listeners.append(admin.listener)
    signals = _signal_queue()
    async with app.router.lifespan_context(app):
        # Excludes loaded modules from collection: a full one would stall all streams for 80 ms.
        gc.freeze()
        serving = [
            asyncio.create_task(server.serve(sockets=[each]))
            for server, each in zip(servers, listeners, strict=True)
        ]
        ending = asyncio.create_task(signals.get())
        in_flight: InFlight = app.state.in_flight
        dispatcher: Dispatcher = app.state.dispatcher
        broken = asyncio.create_task(dispatcher.broken.wait())
        await asyncio.wait((*serving, ending, broken), return_when=asyncio.FIRST_COMPLETED)
        if not broken.done():
            broken.cancel()
            left_s = app.state.live.config.engine.drain_timeout_s
            if ending.done() and ending.result() == signal.SIGUSR1:
                left_s -= await leave(servers, in_flight, signals, left_s)
            await drain(in_flight, dispatcher, signals, left_s)
        dispatcher.fail_all("internal_error", "the frontend failed; try again")
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*serving)
        beating.cancel()
        return not dispatcher.broken.is_set()


def _server(app: FastAPI, tls: FrontendConfig, connections_max: int) -> UvicornServer:
    return UvicornServer(
        uvicorn.Config(
            app,
            http=guarded_protocol(connections_max),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            ssl_certfile=tls.tls_certificate,
            ssl_keyfile=tls.tls_key,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
        )
    )


async def drain(
    in_flight: InFlight, dispatcher: Dispatcher, signals: asyncio.Queue[int], timeout_s: float
) -> None:
    """Rejects new requests and waits up to `timeout_s` for the open ones."""
    in_flight.draining = True
    idle = asyncio.create_task(in_flight.wait_idle())
    again = asyncio.create_task(signals.get())
    await asyncio.wait(
        (idle, again),
        timeout=timeout_s,
        return_when=asyncio.FIRST_COMPLETED,
    )
    for task in (idle, again):
        task.cancel()
    dispatcher.fail_all("shutting_down", "the server was shut down before the request finished")
    with suppress(TimeoutError):
        await asyncio.wait_for(in_flight.wait_idle(), 1.0)


async def leave(
    servers: Sequence[UvicornServer],
    in_flight: InFlight,
    signals: asyncio.Queue[int],
    timeout_s: float,
) -> float:
    """Stops accepting and waits until the open connections have ended.

    Requests on open connections are answered with `Connection: close`. The wait ends after
    `timeout_s` or at a signal. Returns its duration in seconds.
    """
    began_s = time.monotonic()
    for server in servers:
        for each in server.servers:
            each.close()
        server.config.encoded_headers.append((b"connection", b"close"))
        server.server_state.default_headers = list(server.config.encoded_headers)
    unused = asyncio.create_task(_unused(servers, in_flight))
    hurry = asyncio.create_task(signals.get())
    await asyncio.wait((unused, hurry), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in (unused, hurry):
        task.cancel()
    return time.monotonic() - began_s


async def _unused(servers: Sequence[UvicornServer], in_flight: InFlight) -> None:
    """Waits until no connection is left, or none had a request for _IDLE_S: a client that is about
    to reuse its connection must not meet one that is closing."""
    idle_s = 0.0
    while (_connected(servers) or in_flight.busy) and idle_s < _IDLE_S:
        await asyncio.sleep(_POLL_S)
        idle_s = 0.0 if in_flight.busy else idle_s + _POLL_S


def _connected(servers: Sequence[UvicornServer]) -> bool:
    """Returns whether a server has connections, counting those in their TLS handshake."""
    beginning = (getattr(each, "is_beginning", False) for s in servers for each in s.servers)
    return any(server.server_state.connections for server in servers) or any(beginning)


def _connections_max() -> int:
    """Returns the limit on client connections. The other descriptors are for sockets to agents and
    Redis, and for the answer to one client beyond the limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft // 2, soft - _OTHER_FILES)


def _signal_queue() -> asyncio.Queue[int]:
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        loop.add_signal_handler(number, signals.put_nowait, number)
    return signals


def _listener(config: ClusterConfig, fd: int | None) -> socket.socket:
    """Returns the socket that the launcher opened, or a new one."""
    return open_listener(config.host, config.port) if fd is None else socket.socket(fileno=fd)


def _admin(app: FastAPI, config: ClusterConfig, fd: int | None) -> Admin | None:
    if not config.admin:
        return None
    listener = open_admin(config.admin) if fd is None else socket.socket(fileno=fd)
    return Admin(create_admin(app, config), listener)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prism.frontend", description="One OpenAI frontend.")
    parser.add_argument("--config", type=Path, required=True, help="resolved cluster.json")
    parser.add_argument("--frontend-id", default="f0", help="unique in the cluster")
    parser.add_argument(
        "--without-unreadable",
        action="store_true",
        help="leave out models whose tokenizer cannot be loaded",
    )
    parser.add_argument(
        "--listen-fd", type=int, help="a listening socket inherited from the parent"
    )
    parser.add_argument(
        "--admin-fd", type=int, help="the listening socket of frontend.admin, inherited likewise"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
