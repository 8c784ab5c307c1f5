"""Fetching end: copies pages of another process into blocks of this one."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

import kvcached._core as _core
from kvcached.errors import HandoverError, KvcachedError
from kvcached.handover import wire
from kvcached.handover.plan import LocalCache, Shape, pages_of, pieces_of, runs_in

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]

Runs = list[tuple[int, int, int]]


def fetch(target: LocalCache, address: str, ids: Ids, skip: int, timeout_s: float) -> None:
    """Fills the blocks `ids`. Raises HandoverError; their contents are undefined then."""
    until_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        key = _connect(link, address, until_s)
        source, source_ids = _agree(link, target, key, skip + len(ids), until_s)
        pages = len(pages_of(source, source_ids))
        pieces = pieces_of(source, source_ids, target.shape, ids, skip)
        for first in range(0, pages, wire.BATCH_PAGES):
            count = min(wire.BATCH_PAGES, pages - first)
            if runs := runs_in(pieces, first, first + count, source.page_bytes):
                _fetch_pages(link, target, runs, (first, count), until_s)
        wire.send(link, wire.pack_pairs([(0, 0)]), until_s)
        if wire.unpack_pairs(wire.receive(link, until_s)[0]) != [(0, 0)]:
            raise HandoverError("the offer ended while its pages were read")


def _connect(link: socket.socket, address: str, until_s: float) -> str:
    """Connects and returns the offer's key.

    Any process can listen at a free name, so the other end's user is checked.
    """
    wire.set_deadline(link, until_s)
    try:
        name, key = address.rsplit("/", 1)
        link.connect(f"\0{name}")
    except (OSError, ValueError) as error:
        raise HandoverError(f"no process serves {address}: {error}") from error
    if not wire.is_same_user(link):
        raise HandoverError(f"{address} is served by another user")
    return key


def _agree(
    link: socket.socket, target: LocalCache, key: str, count: int, until_s: float
) -> tuple[Shape, Ids]:
    hello = wire.Hello(key, *_core.location(target.client))
    wire.send(link, wire.encode(hello), until_s)
    terms = wire.decode_terms(wire.receive(link, until_s)[0])
    if terms.refusal:
        raise HandoverError(terms.refusal)
    payload, _ = wire.receive(link, until_s)
    if terms.layout != repr(target.layout) or not target.shape.matches(terms.shape):
        raise HandoverError(f"the offered blocks have another layout: {terms.layout}")
    ids = _ids_of(payload, terms.shape)
    if len(ids) < count:
        raise HandoverError(f"{len(ids)} blocks are offered, but {count} are needed")
    return terms.shape, ids


def _ids_of(payload: bytes, shape: Shape) -> Ids:
    import numpy as np

    if len(payload) % 8 or shape.size_bytes >= 1 << 63:
        raise HandoverError("the other end did not send block ids")
    ids = np.frombuffer(payload, dtype=np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < shape.blocks_per_slab * shape.slabs:
        raise HandoverError("the other end sent block ids that are out of range")
    return ids


def _fetch_pages(
    link: socket.socket, target: LocalCache, runs: Runs, pages: tuple[int, int], until_s: float
) -> None:
    wire.send(link, wire.pack_pairs([pages]), until_s)
    payload, files = wire.receive(link, until_s, wire.BATCH_PAGES + 1)
    try:
        places = wire.unpack_pairs(payload)
        if len(places) != pages[1] or not files:
            raise HandoverError(f"{pages[1]} pages were requested, but {len(places)} arrived")
    except HandoverError:
        wire.close_all(files)
        raise
    # The owner's lease stays until the window over its memory is closed, even if the owner dies.
    *files, lease = files
    try:
        window = _core.open_window(target.client, files, places)
        try:
            _core.copy_in(target.cache, window, runs)
        finally:
            window.close()
    except KvcachedError as error:
        raise HandoverError(f"pages of another process cannot be read: {error}") from error
    finally:
        os.close(lease)
