"""Malformed messages for every type of channel and of message are dropped and counted."""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prism.messages.agent import ActionResult, FromAgent, FromScheduler
from prism.messages.cluster import ClusterStatus, ToScheduler
from prism.messages.engine import FromEngine, ToEngine
from prism.messages.forking import ForkServerReady, FromForkServer
from prism.messages.requests import Cancel, EngineOutput, Failure, ToAgent, ToFrontend
from prism.transport import BlockingChannel, Channel, _Decoder, malformed_total
from tests.test_transport import Sockets

UNIONS: dict[str, Any] = {
    "agent to scheduler": FromAgent,
    "to the scheduler": ToScheduler,
    "scheduler to agent": FromScheduler,
    "agent to engine": ToEngine,
    "engine to agent": FromEngine,
    "to a frontend": ToFrontend,
    "frontend to agent": ToAgent,
    "fork server": FromForkServer,
    "status": ClusterStatus,
    "operator": ActionResult,
}
DEPTH = 100_000


def members(union: Any) -> tuple[type[msgspec.Struct], ...]:
    return get_args(union) or (union,)


def any_value(random_: random.Random, depth: int = 0) -> Any:
    leaves = [None, True, -1, 1 << 63, 0.5, float("nan"), "x", b"\xff", "host:0"]
    kind = random_.randrange(4 if depth < 3 else 2)
    if kind < 2:
        return random_.choice(leaves)
    inner = [any_value(random_, depth + 1) for _ in range(random_.randrange(4))]
    return inner if kind == 2 else {str(i): value for i, value in enumerate(inner)}


def attacks(union: Any, random_: random.Random) -> list[list[bytes]]:
    """Frames that look like a message of the union, and are none."""
    found: list[list[bytes]] = [[b""], [random_.randbytes(random_.randrange(1, 400))]]
    found += [[b"", b"\xc0"], [b"a", b"b", b"c"], [random_.randbytes(1 << 20)]]
    found += [[prefix * DEPTH] for prefix in (b"\x91", b"\x81\xa1x", b"\xdd\0\0\0\x01")]
    for member in members(union):
        tag = member.__struct_config__.tag
        fields = [field.encode_name for field in msgspec.structs.fields(member)]
        body = {name: any_value(random_) for name in fields}
        whole = msgspec.msgpack.encode({"type": tag, **body})
        torn = random_.randrange(1, len(whole))
        flipped = bytearray(whole)
        flipped[random_.randrange(len(whole))] ^= 1 << random_.randrange(8)
        head = msgspec.msgpack.encode({"type": tag, "x": None})[:-1]
        deep = [b"\x91" * DEPTH, b"\x81\xa1x" * DEPTH]
        found += [[whole], [whole[:torn]], [whole[:torn], whole[torn:]], [bytes(flipped)]]
        found += [[head + inside] for inside in (*deep, b"\xa2\xff\xff", b"\xdd\xff\xff\xff\xff")]
        for name in fields:
            shape = msgspec.msgpack.encode({"type": tag, name: None})[:-1]
            found += [
                [shape + inside] for inside in (*deep, b"\xa2\xff\xff", b"\xdf\xff\xff\xff\xff")
            ]
    return found


def is_none(union: Any, frames: list[bytes]) -> bool:
    """Returns whether the frames are not a message of the union."""
    try:
        (frame,) = frames
        msgspec.msgpack.decode(frame, type=union)
    except (ValueError, RecursionError):
        return True
    return False


@pytest.mark.parametrize("name", UNIONS)
@pytest.mark.parametrize("kind", [zmq.PULL, zmq.ROUTER, zmq.DEALER])
async def test_a_channel_drops_and_counts_what_is_no_message(
    tmp_path: Path, name: str, kind: int
) -> None:
    sockets = Sockets()
    endpoint = f"ipc://{tmp_path}/socket"
    channel: Channel[Any] = sockets.channel(kind, UNIONS[name])
    channel.bind(endpoint)
    peer = sockets.plain(zmq.PUSH if kind == zmq.PULL else zmq.DEALER)
    peer.connect(endpoint)
    frames = attacks(UNIONS[name], random.Random(f"{name} {kind}"))
    before = malformed_total()
    good = _good(UNIONS[name])
    sending = asyncio.to_thread(_send_all, peer, [*frames, [msgspec.msgpack.encode(good)]])
    sent = asyncio.create_task(sending)
    while (await channel.receive())[1] != good:
        pass
    await sent
    assert malformed_total() - before == sum(is_none(UNIONS[name], each) for each in frames)
    sockets.close()


@pytest.mark.parametrize("name", UNIONS)
def test_a_blocking_channel_drops_and_counts_what_is_no_message(tmp_path: Path, name: str) -> None:
    sockets = Sockets()
    endpoint = f"ipc://{tmp_path}/socket"
    channel: BlockingChannel[Any] = sockets.blocking(zmq.DEALER, UNIONS[name])
    channel.bind(endpoint)
    peer = sockets.plain(zmq.DEALER)
    peer.connect(endpoint)
    frames = attacks(UNIONS[name], random.Random(name))
    before = malformed_total()
    good = _good(UNIONS[name])
    got: list[Any] = []
    for each in [*frames, [msgspec.msgpack.encode(good)]]:
        peer.send_multipart(each)
        channel.socket.poll(10_000)
        got += channel.receive(8)
    assert got[-1] == good
    assert malformed_total() - before == sum(is_none(UNIONS[name], each) for each in frames)
    sockets.close()


@given(st.sampled_from(sorted(UNIONS)), st.lists(st.binary(max_size=200), max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_random_frames(name: str, frames: list[bytes]) -> None:
    before = malformed_total()
    message = _Decoder(UNIONS[name])(frames)
    assert (message is None) == (malformed_total() > before) == is_none(UNIONS[name], frames)


async def test_a_longer_message_than_the_bound_never_arrives(tmp_path: Path) -> None:
    sockets = Sockets()
    endpoint = f"ipc://{tmp_path}/socket"
    channel = sockets.channel(zmq.PULL, Cancel, maxmsgsize=1000)
    channel.bind(endpoint)
    peer = sockets.channel(zmq.PUSH)
    peer.connect(endpoint)
    peer.send(Cancel(["x" * 2000]))
    receiving = asyncio.create_task(channel.receive())
    while not receiving.done():  # the peer connects again after it was cut off
        peer.send(Cancel(["good"]))
        await asyncio.wait([receiving], timeout=0.05)
    assert receiving.result() == (b"", Cancel(["good"]))
    sockets.close()


@pytest.mark.parametrize("frame", [b"\xc1", msgspec.msgpack.encode(Cancel(["x"]))])
async def test_a_flood_leaves_the_loop_its_turns(tmp_path: Path, frame: bytes) -> None:
    sockets = Sockets()
    endpoint = f"ipc://{tmp_path}/socket"
    channel: Channel[Cancel] = sockets.channel(zmq.PULL, Cancel, rcvhwm=0)
    channel.bind(endpoint)
    peer = sockets.plain(zmq.PUSH)
    peer.sndhwm = 0
    peer.connect(endpoint)
    _send_all(peer, [[frame]] * 20_000)
    end = Cancel(["end"])
    peer.send(msgspec.msgpack.encode(end))

    async def receive() -> None:
        while (await channel.receive())[1] != end:
            pass

    receiving, turns = asyncio.create_task(receive()), 0
    while not receiving.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 20_000 // 64
    sockets.close()


async def test_a_flood_of_malformed_messages_does_not_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sockets = Sockets()
    endpoint = f"ipc://{tmp_path}/socket"
    channel = sockets.channel(zmq.PULL, Cancel)
    channel.bind(endpoint)
    peer = sockets.plain(zmq.PUSH)
    peer.connect(endpoint)
    for _ in range(900):
        peer.send(b"\xc1")
    peer.send(msgspec.msgpack.encode(Cancel(["end"])))
    with caplog.at_level(logging.WARNING, "prism.transport"):
        await channel.receive()
    assert caplog.text.count("dropped a malformed message") == 10 + len([16, 32, 64, 128, 256, 512])
    sockets.close()


def _send_all(peer: zmq.Socket[bytes], messages: list[list[bytes]]) -> None:
    for frames in messages:
        peer.send_multipart(frames)


def _good(union: Any) -> msgspec.Struct:
    """Returns a message of the union that is different from all attacks."""
    good: list[msgspec.Struct] = [
        ActionResult(7, True, "good"),
        Cancel(["good"]),
        EngineOutput(failures=[Failure("good", 1, "good", "good")]),
        ForkServerReady(1, 0.5),
        ClusterStatus(1.0, "good", {}, []),
    ]
    return next(each for each in good if isinstance(each, members(union)))
