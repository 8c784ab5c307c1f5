"""CURVE for what goes from machine to machine: encryption, and nobody without the cluster's key.

All processes of a cluster have one secret. It is the key of every socket's end, so that each end
proves to the other that it belongs to the cluster: a server by its public key, which clients must
know, and a client by the same key, which servers ask for (ZAP, RFC 27).
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from prism.errors import PrismError

TCP = "tcp://"
SECRET_CHARS = 40  # Z85 of 32 bytes
# A peer that says nothing for so long is given up, and found again when it is back.
_PING_MS, _SILENT_MS = 1000, 5000
_CONNECT_MS = 3000
_HANDSHAKE_MS = 5000
_RETRY_MS_MAX = 2000


class NoClusterKeyError(PrismError):
    """A socket would be opened beyond this machine for everybody."""


def new_secret() -> str:
    _, secret = zmq.curve_keypair()
    return secret.decode()


def public_of(secret: str) -> str:
    """Raises ValueError for what is no secret."""
    try:
        return zmq.curve_public(secret.encode()).decode()
    except (zmq.ZMQError, ValueError) as error:
        raise ValueError("not a key: it has 40 characters of Z85") from error


@contextmanager
def secured(socket: zmq.Socket[Any], endpoint: str, secret: str, *, server: bool) -> Iterator[None]:
    """Within the block, bind or connect `socket` to `endpoint`. libzmq takes these options over
    then, so other endpoints of the same socket have none of them. Raises NoClusterKeyError."""
    if not endpoint.startswith(TCP):
        yield
        return
    if not secret:
        raise NoClusterKeyError(
            f"{endpoint}: without a key of the cluster nothing is opened beyond this machine; set"
            " cluster_key"
        )
    _set_tcp(socket, endpoint)
    public = public_of(secret).encode()
    socket.curve_secretkey, socket.curve_publickey = secret.encode(), public
    if server:
        socket.curve_server = 1
    else:
        socket.curve_serverkey = public
    try:
        yield
    finally:
        socket.curve_server = 0  # back to no mechanism at all
        socket.heartbeat_ivl = 0


def _set_tcp(socket: zmq.Socket[Any], endpoint: str) -> None:
    """A machine that is cut off closes no connection."""
    socket.heartbeat_ivl, socket.heartbeat_timeout = _PING_MS, _SILENT_MS
    socket.connect_timeout, socket.handshake_ivl = _CONNECT_MS, _HANDSHAKE_MS
    socket.reconnect_ivl_max = _RETRY_MS_MAX
    socket.ipv6 = "[" in endpoint


class KeyHolders:
    """Lets peers in that have the cluster's key. For one event loop and one context, whose sockets
    it serves until `close`."""

    def __init__(self, context: zmq.asyncio.Context, secret: str) -> None:
        self._public = public_of(secret).encode()
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.configure_curve_callback("*", self)
        self._authenticator.start()

    def callback(self, _domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)

    def close(self) -> None:
        self._authenticator.stop()
