"""Typed messages over real ZeroMQ sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import zmq
import zmq.asyncio

from prism.messages.agent import ActionResult
from prism.messages.cluster import OperatorCommand
from prism.messages.requests import Cancel
from prism.transport import BlockingChannel, Channel

MALFORMED = {
    "empty": b"",
    "no MessagePack": b"\xc1 no MessagePack",
    "unknown type": b"\x81\xa4type\xa4Nope",
    "wrong field": msgspec.msgpack.encode({"type": "Cancel", "request_ids": 7}),
    "no UTF-8": msgspec.msgpack.encode(Cancel(["xx"])).replace(b"xx", b"\xff\xff"),
    "too deep": b"\x82\xa4type\xa6Cancel\xa1x" + b"\x91" * 200_000,
}


class Sockets:
    """Opens sockets for a test, and keeps them until its end."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._blocking: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._kept: list[Any] = []

    def channel(self, kind: int, receives: Any = None, **options: Any) -> Channel[Any]:
        self._kept.append(Channel(self._context, kind, receives, **options))
        return cast(Channel[Any], self._kept[-1])

    def blocking(self, kind: int, receives: Any = None, **options: Any) -> BlockingChannel[Any]:
        self._kept.append(BlockingChannel(self._blocking, kind, receives, **options))
        return cast(BlockingChannel[Any], self._kept[-1])

    def plain(self, kind: int) -> zmq.Socket[bytes]:
        self._kept.append(self._blocking.socket(kind))
        return cast("zmq.Socket[bytes]", self._kept[-1])

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._blocking.destroy(linger=0)


@pytest.fixture
async def sockets() -> AsyncIterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.close()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/socket"


def _replace(endpoint: str) -> None:
    path = Path(endpoint.removeprefix("ipc://"))
    path.unlink()
    path.write_text("junk")


def _has_socket(endpoint: str) -> bool:
    return Path(endpoint.removeprefix("ipc://")).is_socket()


async def test_a_file_in_the_place_of_a_socket_goes(sockets: Sockets, endpoint: str) -> None:
    inbox = sockets.channel(zmq.PULL, Cancel)
    inbox.bind(endpoint)
    _replace(endpoint)
    async with asyncio.timeout(10):
        while not _has_socket(endpoint):
            await asyncio.sleep(0.01)
        sender = sockets.channel(zmq.PUSH)
        sender.connect(endpoint)
        sender.send(Cancel(["r"]))
        assert await inbox.receive() == (b"", Cancel(["r"]))


async def test_a_router_names_the_sender_and_answers_it(sockets: Sockets, endpoint: str) -> None:
    router = sockets.channel(zmq.ROUTER, OperatorCommand)
    router.bind(endpoint)
    dealer = sockets.channel(zmq.DEALER, ActionResult, identity=b"me")
    dealer.connect(endpoint)
    dealer.send(OperatorCommand("status"))
    sender, command = await router.receive()
    assert (sender, command) == (b"me", OperatorCommand("status"))
    router.send(ActionResult(3, True), sender)
    assert await dealer.receive() == (b"", ActionResult(3, True))


async def test_what_is_there_comes_without_waiting(sockets: Sockets, endpoint: str) -> None:
    """Drops malformed messages."""
    inbox, sender = sockets.channel(zmq.PULL, Cancel), sockets.plain(zmq.PUSH)
    inbox.bind(endpoint)
    assert inbox.arrived() == []
    sender.connect(endpoint)
    for each in (Cancel(["a"]), "junk", Cancel(["b"])):
        sender.send(msgspec.msgpack.encode(each))
    found: list[Cancel] = []
    async with asyncio.timeout(10):
        while len(found) < 2:
            await asyncio.sleep(0.01)
            found += inbox.arrived()
    assert found == [Cancel(["a"]), Cancel(["b"])]


async def test_bytes_on_the_wire_are_messagepack_in_one_frame(
    sockets: Sockets, endpoint: str
) -> None:
    pull = sockets.plain(zmq.PULL)
    pull.bind(endpoint)
    push = sockets.channel(zmq.PUSH)
    push.connect(endpoint)
    push.send(Cancel(["a"]))
    assert await asyncio.to_thread(pull.recv_multipart) == [msgspec.msgpack.encode(Cancel(["a"]))]


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_messages_are_logged_and_dropped(
    sockets: Sockets, endpoint: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    pull = sockets.channel(zmq.PULL, Cancel)
    pull.bind(endpoint)
    push = sockets.plain(zmq.PUSH)
    push.connect(endpoint)
    push.send(MALFORMED[name])
    # Together they would be a message.
    whole = msgspec.msgpack.encode(Cancel(["two frames"]))
    push.send_multipart([whole[:9], whole[9:]])
    push.send(msgspec.msgpack.encode(Cancel(["good"])))
    with caplog.at_level(logging.WARNING, "prism.transport"):
        assert await pull.receive() == (b"", Cancel(["good"]))
    assert caplog.text.count("dropped a malformed message") == 2


async def test_a_message_to_an_absent_peer_is_an_error_where_that_is_asked_for(
    sockets: Sockets, endpoint: str
) -> None:
    router = sockets.channel(zmq.ROUTER, Cancel, router_mandatory=1)
    router.bind(endpoint)
    with pytest.raises(zmq.ZMQError):
        router.send(Cancel([]), b"nobody")


async def test_a_send_never_blocks_the_loop(sockets: Sockets, endpoint: str) -> None:
    dealer = sockets.channel(zmq.DEALER, Cancel, sndhwm=1, immediate=1)
    dealer.connect(endpoint)
    with pytest.raises(zmq.Again):
        dealer.send(Cancel([]))


async def test_what_comes_while_others_send_is_received(sockets: Sockets, endpoint: str) -> None:
    """Sends consume libzmq's notification on the descriptor that the receiver waits for."""
    router = sockets.plain(zmq.ROUTER)
    router.bind(endpoint)
    dealer = sockets.channel(zmq.DEALER, Cancel, identity=b"me")
    dealer.connect(endpoint)
    dealer.send(Cancel(["first"]))
    assert await asyncio.to_thread(router.recv_multipart) != []
    receiving = asyncio.create_task(dealer.receive())
    await asyncio.sleep(0)
    router.send_multipart([b"me", msgspec.msgpack.encode(Cancel(["answer"]))])
    for _ in range(900):
        dealer.send(Cancel([]))
    assert await asyncio.wait_for(receiving, 10) == (b"", Cancel(["answer"]))


async def test_a_thread_and_a_loop(sockets: Sockets, endpoint: str) -> None:
    router = sockets.channel(zmq.ROUTER, Cancel)
    router.bind(endpoint)
    engine = sockets.blocking(zmq.DEALER, Cancel, identity=b"e0")
    engine.connect(endpoint)
    assert engine.receive(8) == []
    engine.send(Cancel(["out"]))
    assert await router.receive() == (b"e0", Cancel(["out"]))
    for name in "abc":
        router.send(Cancel([name]), b"e0")
    got: list[Cancel] = []
    while len(got) < 3:
        await asyncio.to_thread(engine.socket.poll, 1000)
        fresh = engine.receive(count_max=2)
        assert len(fresh) <= 2
        got += fresh
    assert got == [Cancel(["a"]), Cancel(["b"]), Cancel(["c"])]


def test_a_thread_drops_malformed_messages(
    sockets: Sockets, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    pull = sockets.blocking(zmq.PULL, Cancel)
    pull.bind(endpoint)
    push = sockets.plain(zmq.PUSH)
    push.connect(endpoint)
    for frame in (*MALFORMED.values(), msgspec.msgpack.encode(Cancel(["good"]))):
        push.send(frame)
    got: list[Cancel] = []
    with caplog.at_level(logging.WARNING, "prism.transport"):
        while not got:
            pull.socket.poll(1000)
            got = pull.receive(100)
    assert got == [Cancel(["good"])]
    assert caplog.text.count("dropped a malformed message") == len(MALFORMED)


def test_a_send_that_must_not_block(sockets: Sockets, endpoint: str) -> None:
    push = sockets.blocking(zmq.PUSH, sndhwm=1, immediate=1)
    push.connect(endpoint)
    with pytest.raises(zmq.Again):
        push.send(Cancel([]), block=False)
