"""What the two ends of a hand-over say to each other, over a Unix socket of the machine.

A frame is its length and its payload; descriptors travel with its first byte. The end that fetches
speaks first:
  Hello   (JSON)             -> Terms (JSON), or a refusal; and the ids of the blocks (int64)
  first, count (int64 x 2)   -> file and offset of each page (int64 x 2 each), with the files and,
                                as the last descriptor, the lock that keeps the owner's lease
  0, 0                       -> 0, 0: everything that was read was what the owner had offered
A closed connection is an end of it at any point. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvcached.errors import HandoverError
from kvcached.handover.plan import Shape

VERSION = 1
# Descriptors of one message: the kernel's bound is 253, a process's often 1024.
BATCH_PAGES = 128
_LENGTH = struct.Struct("<Q")
_FRAME_BYTES_MAX = 1 << 28
_PAIR_BYTES = 16


@dataclass(frozen=True, slots=True)
class Hello:
    """Who fetches what: the key of an offer, and where the pages would be read."""

    key: str
    on_gpu: bool
    ordinal: int
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Terms:
    """What is offered. refusal: why it is not, "" if it is."""

    refusal: str = ""
    layout: str = ""
    page_bytes: int = 0
    slab_pages: tuple[int, ...] = ()
    blocks_per_slab: int = 0
    slabs: int = 0

    @property
    def shape(self) -> Shape:
        return Shape(self.page_bytes, tuple(self.slab_pages), self.blocks_per_slab, self.slabs)


def encode(message: Hello | Terms) -> bytes:
    return json.dumps(asdict(message)).encode()


def decode_hello(payload: bytes) -> Hello:
    found = _object(payload)
    numbers = [_number(found, name) for name in ("on_gpu", "ordinal", "version")]
    return Hello(_text(found, "key"), bool(numbers[0]), numbers[1], numbers[2])


def decode_terms(payload: bytes) -> Terms:
    found = _object(payload)
    slab_pages = found.get("slab_pages")
    if not isinstance(slab_pages, list):
        raise HandoverError("the other end sent no slab_pages")
    return Terms(
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
    except ValueError as error:
        raise HandoverError(f"the other end sent no JSON: {error}") from error
    if not isinstance(found, dict):
        raise HandoverError("the other end sent something else than an object")
    return found


def _text(found: dict[str, object], name: str) -> str:
    if not isinstance(value := found.get(name), str):
        raise HandoverError(f"the other end sent no {name}")
    return value


def _number(found: dict[str, object], name: str) -> int:
    if not isinstance(value := found.get(name), int) or not 0 <= value < 1 << 40:
        raise HandoverError(f"the other end sent no {name}")
    return int(value)


def send(link: socket.socket, payload: bytes, files: Sequence[int] = ()) -> None:
    """Raises HandoverError when the other end is gone, or does not read in the link's time."""
    frame = _LENGTH.pack(len(payload)) + payload
    try:
        sent = socket.send_fds(link, [frame], files) if files else 0
        if sent < len(frame):
            link.sendall(frame[sent:])
    except OSError as error:
        raise HandoverError(f"the other end is gone: {error}") from error


def receive(link: socket.socket, files_max: int = 0) -> tuple[bytes, list[int]]:
    """The next frame and its descriptors, which are the caller's to close."""
    files: list[int] = []
    try:
        start, files, _, _ = socket.recv_fds(link, _LENGTH.size, files_max)
        start += _read(link, _LENGTH.size - len(start)) if start else b""
        if not start:
            raise HandoverError("the other end closed the connection")
        (length,) = _LENGTH.unpack(start)
        if length > _FRAME_BYTES_MAX:
            raise HandoverError(f"the other end announces {length} bytes")
        return _read(link, length), files
    except OSError as error:
        close_all(files)
        raise HandoverError(f"the other end is gone: {error}") from error
    except HandoverError:
        close_all(files)
        raise


def _read(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
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
        raise HandoverError(f"the other end sent {len(payload)} bytes for pairs of numbers")
    return list(struct.iter_unpack("<qq", payload))
