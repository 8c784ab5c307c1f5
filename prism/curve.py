"""CURVE for connections between machines: encryption, and access only with the cluster's key.

All processes of a cluster share one secret, which is the key of both ends of every connection.
Clients know the server by its public key. Servers ask clients for the same key (ZAP, RFC 27).
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
# A peer that is silent for _SILENT_MS is disconnected. It is connected again when it returns.
_PING_MS, _SILENT_MS = 1000, 5000
_CONNECT_MS = 3000
_HANDSHAKE_MS = 5000
_RETRY_MS_MAX = 2000


class NoClusterKeyError(PrismError):
    """Raised for a socket that other machines could reach without a key."""


def new_secret() -> str:
    """Returns a new secret key in Z85."""
    _, secret = zmq.curve_keypair()
    return secret.decode()


def public_key(secret: str) -> str:
    """Returns the public key of `secret`. Raises ValueError if it is not a valid secret."""
    try:
        return zmq.curve_public(secret.encode()).decode()
    except (zmq.ZMQError, ValueError) as error:
        raise ValueError("is not a valid key: a key has 40 characters of Z85") from error


@contextmanager
def secured(socket: zmq.Socket[Any], endpoint: str, secret: str, *, server: bool) -> Iterator[None]:
    """Sets the options for one `bind` or `connect` of `socket` to `endpoint` within the block.

    libzmq applies the options at that call, so that other endpoints of the same socket do not have
    them. Raises NoClusterKeyError.
    """
    if not endpoint.startswith(TCP):
        yield
        return
    if not secret:
        raise NoClusterKeyError(
            f"{endpoint}: a socket for other machines needs a key of the cluster; set cluster_key"
        )
    _set_tcp(socket, endpoint)
    public = public_key(secret).encode()
    socket.curve_secretkey, socket.curve_publickey = secret.encode(), public
    if server:
        socket.curve_server = 1
    else:
        socket.curve_serverkey = public
    try:
        yield
    finally:
        socket.curve_server = 0  # back to no security mechanism
        socket.heartbeat_ivl = 0


def _set_tcp(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Sets keep-alive and retry options, since a machine that is cut off closes no connection."""
    socket.heartbeat_ivl, socket.heartbeat_timeout = _PING_MS, _SILENT_MS
    socket.connect_timeout, socket.handshake_ivl = _CONNECT_MS, _HANDSHAKE_MS
    socket.reconnect_ivl_max = _RETRY_MS_MAX
    socket.ipv6 = "[" in endpoint


class KeyAuthenticator:
    """Authenticator that accepts peers with the cluster's key. It serves the sockets of one context
    on one event loop until `close`."""

    def __init__(self, context: zmq.asyncio.Context, secret: str) -> None:
        self._public = public_key(secret).encode()
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.configure_curve_callback("*", self)
        self._authenticator.start()

    def callback(self, _domain: str, key: bytes) -> bool:
        """Returns True if a peer has the cluster's public key. Called by pyzmq."""
        return hmac.compare_digest(key, self._public)

    def close(self) -> None:
        self._authenticator.stop()
