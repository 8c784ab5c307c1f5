"""Protocol of a hand-over, over a Unix socket of the machine.

A frame is its length and its payload; descriptors travel with its first byte. The fetching end
sends the first frame:
  Hello   (JSON)             -> OfferTerms (JSON), or a refusal; then the block ids (int64)
  first, count (int64 x 2)   -> file and offset of each page (int64 x 2 each), with the files and,
                                as the last descriptor, the lock that keeps the owner's lease
  0, 0                       -> 0, 0: the offer was open until all of it was read
Either end may close the connection at any point, which ends the offer. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvcached.errors import HandoverError
from kvcached.handover.plan import Shape

VERSION = 1
# Descriptors of one message. The kernel's limit is 253, a process's is often 1024.
BATCH_PAGES = 128
_LENGTH = struct.Struct("<Q")
ASK_BYTES_MAX = 1 << 10
"""Limit of a frame to the offering end: a Hello or a pair."""
_FRAME_BYTES_MAX = 1 << 28
_ORDINALS = 1 << 16
_PAIR_BYTES = 16


class MalformedFrameError(HandoverError):
    """A received frame is not valid in this protocol."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Key of the offer, and the device that will read it."""

    key: str
    on_gpu: bool
    ordinal: int
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class OfferTerms:
    """Geometry of the offered blocks. `refusal` is the reason for a refusal, or ""."""

    refusal: str = ""
    layout: str = ""
    page_bytes: int = 0
    slab_pages: tuple[int, ...] = ()
    blocks_per_slab: int = 0
    slabs: int = 0

    @property
    def shape(self) -> Shape:
        return Shape(self.page_bytes, tuple(self.slab_pages), self.blocks_per_slab, self.slabs)


def encode(message: Hello | OfferTerms) -> bytes:
    return json.dumps(asdict(message)).encode()


def decode_hello(payload: bytes) -> Hello:
    found = _object(payload)
    ordinal = _number(found, "ordinal", _ORDINALS)
    on_gpu, version = _number(found, "on_gpu"), _number(found, "version")
    return Hello(_text(found, "key"), bool(on_gpu), ordinal, version)


def decode_terms(payload: bytes) -> OfferTerms:
    found = _object(payload)
    slab_pages = found.get("slab_pages")
    if not isinstance(slab_pages, list):
        raise MalformedFrameError("the other end did not send slab_pages")
    return OfferTerms(
        _text(found, "refusal"),
        _text(found, "layout"),
        _number(found, "page_bytes"),
        tuple(_number({"slab_pages": pages}, "slab_pages") for pages in slab_pages),
        _number(found, "blocks_per_slab"),
        _number(found, "slabs"),
    )


def _object(payload: bytes) -> dict[str, object]:
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise MalformedFrameError(f"the other end did not send JSON: {error}") from error
    if not isinstance(found, dict):
        raise MalformedFrameError("the other end did not send a JSON object")
    return found


def _text(found: dict[str, object], name: str) -> str:
    if not isinstance(value := found.get(name), str):
        raise MalformedFrameError(f"the other end did not send a valid {name}")
    return value


def _number(found: dict[str, object], name: str, end: int = 1 << 40) -> int:
    if not isinstance(value := found.get(name), int) or not 0 <= value < end:
        raise MalformedFrameError(f"the other end did not send a valid {name}")
    return int(value)


def is_same_user(link: socket.socket) -> bool:
    """Returns whether the other end runs as this user, which can read this memory in any case."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return bool(struct.unpack("3i", credentials)[1] == os.geteuid())


def set_deadline(link: socket.socket, until_s: float) -> None:
    """Sets the timeout of the link's next call. Raises HandoverError after the deadline.

    `until_s` is a time of the monotonic clock.
    """
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise HandoverError("the hand-over timed out")
    link.settimeout(left_s)


def send(link: socket.socket, payload: bytes, until_s: float, files: Sequence[int] = ()) -> None:
    """Sends a frame.

    Raises HandoverError if the other end is gone, or has not received all of it by `until_s`.
    """
    frame = _LENGTH.pack(len(payload)) + payload
    set_deadline(link, until_s)
    try:
        sent = socket.send_fds(link, [frame], files) if files else 0
        if sent < len(frame):
            set_deadline(link, until_s)
            link.sendall(frame[sent:])  # the timeout covers the whole call
    except OSError as error:
        raise HandoverError(f"the other end is gone: {error}") from error


def receive(
    link: socket.socket, until_s: float, files_max: int = 0, bytes_max: int = _FRAME_BYTES_MAX
) -> tuple[bytes, list[int]]:
    """Returns the next frame and its descriptors, which the caller closes.

    Raises HandoverError if the other end is gone, has not sent all of it by `until_s`, or sends
    more than the limits.
    """
    files: list[int] = []
    try:
        start = _read_start(link, until_s, files_max, files)
        start += _read(link, _LENGTH.size - len(start), until_s) if start else b""
        if not start:
            raise HandoverError("the other end closed the connection")
        (length,) = _LENGTH.unpack(start)
        if length > bytes_max:
            raise MalformedFrameError(f"the other end announces {length} bytes")
        return _read(link, length, until_s), files
    except OSError as error:
        close_all(files)
        raise HandoverError(f"the other end is gone: {error}") from error
    except HandoverError:
        close_all(files)
        raise


def _read_start(link: socket.socket, until_s: float, files_max: int, files: list[int]) -> bytes:
    """Reads the first bytes of a frame and its descriptors.

    Not `socket.recv_fds`, whose descriptors are inherited by every program that is started.
    """
    numbers = array("i")
    space = socket.CMSG_LEN(files_max * numbers.itemsize) if files_max else 0
    set_deadline(link, until_s)
    start, messages, flags, _ = link.recvmsg(_LENGTH.size, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    files += numbers
    if files_max and flags & socket.MSG_CTRUNC:
        raise HandoverError("descriptors were lost: this process has too many open files")
    return start


def _read(link: socket.socket, size: int, until_s: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        set_deadline(link, until_s)
        part = link.recv(min(size - len(data), 1 << 20))
        if not part:
            raise HandoverError("the other end closed the connection")
        data += part
    return bytes(data)


def close_all(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def pack_pairs(pairs: Sequence[tuple[int, int]]) -> bytes:
    return b"".join(struct.pack("<qq", *pair) for pair in pairs)


def unpack_pairs(payload: bytes) -> list[tuple[int, int]]:
    if len(payload) % _PAIR_BYTES:
        raise MalformedFrameError(f"{len(payload)} bytes from the other end are not number pairs")
    pairs: list[tuple[int, int]] = list(struct.iter_unpack("<qq", payload))
    if any(min(pair) < 0 for pair in pairs):
        raise MalformedFrameError("the other end sent a negative number")
    return pairs
