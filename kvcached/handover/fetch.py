"""The target's end: pages of another process, read into blocks of this one."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached import _core
from kvcached.errors import HandoverError, KvcachedError
from kvcached.handover import wire
from kvcached.handover.plan import Shape, pages_of, pieces_of, runs_in

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvcached.layouts import KVLayout

    Ids = NDArray[np.int64]

Runs = list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Target:
    """Where it goes: a KV cache and its client."""

    client: _core.Client
    cache: _core.KvCache
    layout: KVLayout
    shape: Shape


def fetch(target: Target, address: str, ids: Ids, skip: int, timeout_s: float) -> None:
    """Raises HandoverError; the blocks hold anything then."""
    until_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(timeout_s)
        try:
            name, key = address.rsplit("/", 1)
            link.connect(f"\0{name}")
        except (OSError, ValueError) as error:
            raise HandoverError(f"nobody offers {address}: {error}") from error
        source, source_ids = _agree(link, target, key, skip + len(ids))
        pages = len(pages_of(source, source_ids))
        pieces = pieces_of(source, source_ids, target.shape, ids, skip)
        for first in range(0, pages, wire.BATCH_PAGES):
            count = min(wire.BATCH_PAGES, pages - first)
            if runs := runs_in(pieces, first, first + count, source.page_bytes):
                _be_quick(link, until_s)
                _fetch_pages(link, target, runs, first, count)
        _be_quick(link, until_s)
        wire.send(link, wire.pack_pairs([(0, 0)]))
        if wire.unpack_pairs(wire.receive(link)[0]) != [(0, 0)]:
            raise HandoverError("the other end does not stand by what it offered")


def _be_quick(link: socket.socket, until_s: float) -> None:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise HandoverError("the time for it is over")
    link.settimeout(left_s)


def _agree(link: socket.socket, target: Target, key: str, count: int) -> tuple[Shape, Ids]:
    import numpy as np

    wire.send(link, wire.encode(wire.Hello(key, *_core.location(target.client))))
    terms = wire.decode_terms(wire.receive(link)[0])
    if terms.refusal:
        raise HandoverError(terms.refusal)
    ids = np.frombuffer(wire.receive(link)[0], dtype=np.int64)
    if terms.layout != repr(target.layout) or not target.shape.matches(terms.shape):
        raise HandoverError(f"the blocks are of another layout: {terms.layout}")
    if len(ids) < count:
        raise HandoverError(f"{len(ids)} blocks are offered, {count} are wanted")
    return terms.shape, ids


def _fetch_pages(link: socket.socket, target: Target, runs: Runs, first: int, count: int) -> None:
    wire.send(link, wire.pack_pairs([(first, count)]))
    payload, files = wire.receive(link, wire.BATCH_PAGES + 1)
    places = wire.unpack_pairs(payload)
    if len(places) != count or not files:
        wire.close_all(files)
        raise HandoverError(f"{count} pages were asked for, {len(places)} came")
    # The owner's lease stays until the window over its memory is gone, even if it dies now.
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
