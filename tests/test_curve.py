"""Sockets beyond the machine accept only peers with a key; the machine's own need none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.utils.monitor

from prism.curve import NoClusterKeyError, new_secret, public_key
from prism.messages.agent import ActionResult
from prism.messages.cluster import OperatorCommand
from prism.messages.requests import Cancel
from prism.transport import Channel
from tests.ports import free_port
from tests.test_transport import Sockets

SOON_S = 20.0


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made = Sockets()
    yield made
    made.close()


@pytest.fixture
def endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


SECRET = new_secret()


async def test_holders_of_the_key_talk(sockets: Sockets, endpoint: str) -> None:
    router = sockets.channel(zmq.ROUTER, OperatorCommand, secret=SECRET)
    router.bind(endpoint)
    dealer = sockets.channel(zmq.DEALER, ActionResult, secret=SECRET, identity=b"me")
    dealer.connect(endpoint)
    dealer.send(OperatorCommand("status"))
    sender, command = await asyncio.wait_for(router.receive(), SOON_S)
    assert (sender, command) == (b"me", OperatorCommand("status"))
    router.send(ActionResult(3, True), sender)
    assert await asyncio.wait_for(dealer.receive(), SOON_S) == (b"", ActionResult(3, True))
    router.close()


def stranger(
    sockets: Sockets, server_public: str, own: tuple[bytes, bytes] | None
) -> zmq.Socket[bytes]:
    plain = sockets.plain(zmq.PUSH)
    if own is not None:
        plain.curve_publickey, plain.curve_secretkey = own
        plain.curve_serverkey = server_public.encode()
    return plain


FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


async def refused(peer: zmq.Socket[bytes], endpoint: str) -> bool:
    """Returns whether the handshake of `peer` fails."""
    with peer.get_monitor_socket(FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED) as events:
        peer.connect(endpoint)
        for _ in range(round(SOON_S / 0.05)):
            if events.poll(0):
                kind = zmq.utils.monitor.recv_monitor_message(events)["event"]
                peer.disable_monitor()
                return kind != zmq.EVENT_HANDSHAKE_SUCCEEDED
            await asyncio.sleep(0.05)  # the server asks for keys in this loop
    raise AssertionError("neither let in nor refused")


@pytest.mark.parametrize("who", ["no key", "another cluster's", "the servers' public key alone"])
async def test_a_peer_without_the_key_is_refused(sockets: Sockets, endpoint: str, who: str) -> None:
    inbox = sockets.channel(zmq.PULL, Cancel, secret=SECRET)
    inbox.bind(endpoint)
    known = public_key(new_secret() if who == "another cluster's" else SECRET)
    peer = stranger(sockets, known, None if who == "no key" else zmq.curve_keypair())
    assert await refused(peer, endpoint)
    holder = sockets.channel(zmq.PUSH, secret=SECRET)
    holder.connect(endpoint)
    holder.send(Cancel(["x"]))
    assert await asyncio.wait_for(inbox.receive(), SOON_S) == (b"", Cancel(["x"]))
    inbox.close()


async def test_a_stranger_gets_nothing_that_is_sent(sockets: Sockets, endpoint: str) -> None:
    """Binds an address of the cluster without its key."""
    false = sockets.plain(zmq.PULL)
    false.curve_publickey, false.curve_secretkey = zmq.curve_keypair()
    false.curve_server = 1
    false.bind(endpoint)
    sender: Channel[None] = sockets.channel(zmq.PUSH, secret=SECRET)
    sender.connect(endpoint)
    sender.send(Cancel(["secret"]))
    assert not false.poll(500)


async def test_nothing_opens_beyond_the_machine_without_a_key(
    sockets: Sockets, endpoint: str
) -> None:
    for kind in (zmq.ROUTER, zmq.PULL):
        with pytest.raises(NoClusterKeyError, match="set cluster_key"):
            sockets.channel(kind, Cancel).bind(endpoint)
    with pytest.raises(NoClusterKeyError, match=endpoint):
        sockets.channel(zmq.PUSH).connect(endpoint)
    with pytest.raises(NoClusterKeyError, match=endpoint):
        sockets.blocking(zmq.PUSH).connect(endpoint)


async def test_one_socket_serves_the_machine_without_keys_and_others_with_them(
    sockets: Sockets, endpoint: str, short_dir: Path
) -> None:
    path = short_dir / "socket"
    inbox = sockets.channel(zmq.PULL, Cancel, secret=SECRET)
    inbox.bind(f"ipc://{path}")
    inbox.bind(endpoint)
    for place in (endpoint, f"ipc://{path}", endpoint):
        sender = sockets.channel(zmq.PUSH, secret=SECRET if place == endpoint else "")
        sender.connect(place)
        sender.send(Cancel([place]))
        assert await asyncio.wait_for(inbox.receive(), SOON_S) == (b"", Cancel([place]))
    path.unlink()
    for _ in range(100):  # it is bound again, as it was
        if path.exists():
            break
        await asyncio.sleep(0.1)
    sender = sockets.channel(zmq.PUSH)
    sender.connect(f"ipc://{path}")
    sender.send(Cancel(["again"]))
    assert await asyncio.wait_for(inbox.receive(), SOON_S) == (b"", Cancel(["again"]))
    inbox.close()


def test_what_is_no_key_is_refused() -> None:
    for text in ("", "x", "ü" * 40, "0" * 39):
        with pytest.raises(ValueError, match="40 characters"):
            public_key(text)
