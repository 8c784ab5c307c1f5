"""The source's end: blocks that are kept as they are until another process has fetched them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import kvcached._core as _core
from kvcached.errors import ClosedError, HandoverError, KvcachedError
from kvcached.handover import wire
from kvcached.handover.offer import Offer
from kvcached.handover.plan import LocalCache, pages_of
from kvcached.handover.server import OfferServer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]

GRACE_S = 1.0
"""An offer whose pages are being read stays this much longer than its deadline."""
LOOK_S = 60.0


@dataclass(slots=True, eq=False)
class _Open:
    """An offer that stands. `link`: the fetcher's connection; `reading`: it has seen pages."""

    ids: Ids
    pages: Ids
    until_s: float
    link: socket.socket | None = None
    reading: bool = False


class Offers:
    """All offers of one KV cache, and the thread that serves them while there are any.

    `standing`: by key; looked at without the lock where a free must cost nothing. free(ids) gives
    blocks back to the cache, from either thread. Thread rule: the cache's thread.
    """

    def __init__(self, source: LocalCache, free: Callable[[Ids], None]) -> None:
        self._source = source
        self._free = free
        self._lock = threading.Lock()
        self.standing: dict[str, _Open] = {}
        self._freed: set[int] = set()
        self._server: OfferServer | None = None

    def add(self, ids: Ids, deadline_s: float) -> Offer:
        """REQUIRES: live blocks, each once. Raises HandoverError if nothing could serve them."""
        pages = pages_of(self._source.shape, ids)
        _core.wait_for_streams(self._source.client)  # what they write there is there then
        # Once for the error that it would be: a driver that shares nothing, a closed client.
        wire.close_all(_core.export_pages(self._source.cache, pages[:1].tolist())[0])
        key = os.urandom(8).hex()
        with self._lock:
            if self._server is None:
                self._server = self._serve()
            self.standing[key] = _Open(ids.copy(), pages, time.monotonic() + deadline_s)
            self._server.wake()
            name = self._server.name
        return Offer(f"{name}/{key}", lambda: key in self.standing, lambda: self.end(key))

    def _serve(self) -> OfferServer:
        """Its thread waits for the lock, which the caller has, before it looks for offers."""
        try:
            return OfferServer(self)
        except (OSError, RuntimeError) as error:
            raise HandoverError(f"blocks cannot be offered: {error}") from error

    def __len__(self) -> int:
        """Of an offer that is not counted any more the blocks have gone as well."""
        self.expire()
        with self._lock:
            return len(self.standing)

    def keep(self, ids: Ids) -> Ids:
        """Splits freed blocks: returns those that no offer holds; the others are freed later.
        Raises KeyError with a block that was freed before."""
        import numpy as np

        self.expire()
        with self._lock:
            if not self.standing:
                return ids
            offered = np.concatenate([offer.ids for offer in self.standing.values()])
            held = np.isin(ids, offered)
            later = {int(i) for i in ids[held]}
            if again := later & self._freed:
                raise KeyError(min(again))
            self._freed |= later
            return ids[~held]

    def end(self, key: str) -> None:
        """The offer is over: its blocks go if their owner has freed them. Any thread."""
        import numpy as np

        with self._lock:
            offer = self.standing.get(key)
            if offer is None:
                return
            if offer.link is not None:
                with contextlib.suppress(OSError):  # the other end was faster
                    offer.link.shutdown(socket.SHUT_RDWR)
            others = [each for each in self.standing.values() if each is not offer]
            still = {int(i) for each in others for i in each.ids}
            gone = ({int(i) for i in offer.ids} & self._freed) - still
            self._freed -= gone
            if gone:
                with contextlib.suppress(ClosedError):  # then they went with the cache
                    self._free(np.array(sorted(gone), dtype=np.int64))
            del self.standing[key]  # last: without an offer the cache alone decides on the blocks
            if self._server is not None:
                self._server.wake()

    def close(self) -> None:
        """Ends all of them."""
        server = self._server
        for key in list(self.standing):
            self.end(key)
        if server is not None:
            server.join()

    # --- the serving thread ----------------------------------------------------------------

    def leave(self) -> bool:
        """Whether the serving thread may end, for want of offers; the next one starts another."""
        with self._lock:
            if not self.standing:
                self._server = None
            return not self.standing

    def give_up(self) -> None:
        """The serving thread ends although there are offers, so they are over."""
        with self._lock:
            self._server = None
            keys = list(self.standing)
        for key in keys:
            self.end(key)

    def expire(self) -> float:
        """Ends those whose time is over; how long until there are more, or a while. Any thread."""
        now_s = time.monotonic()
        late = [key for key, offer in list(self.standing.items()) if _due_s(offer) <= now_s]
        for key in late:
            self.end(key)
        return min((_due_s(o) - now_s for o in list(self.standing.values())), default=LOOK_S)

    def terms(self, hello: wire.Hello, link: socket.socket) -> tuple[wire.OfferTerms, Ids | None]:
        """The answer to a request for a key: terms, and the ids of the blocks."""
        source, shape = self._source, self._source.shape
        if hello.version != wire.VERSION:
            return wire.OfferTerms(f"this end speaks version {wire.VERSION}"), None
        if not _core.can_share_with(source.client, hello.on_gpu, hello.ordinal):
            self.end(hello.key)  # the offer was for this fetcher alone
            return wire.OfferTerms("the device there cannot read the memory of this one"), None
        with self._lock:
            offer = self.standing.get(hello.key)
            if offer is None or offer.link is not None:
                return wire.OfferTerms("the offer is over, or somebody fetches it"), None
            offer.link = link
        return wire.OfferTerms(
            "",
            repr(source.layout),
            shape.page_bytes,
            shape.slab_pages,
            shape.blocks_per_slab,
            shape.slabs,
        ), offer.ids

    def fetched(self, key: str, link: socket.socket) -> bool:
        """Its fetcher has everything; whether the offer stood until now. It is over then."""
        with self._lock:
            offer = self.standing.get(key)
            if offer is None or offer.link is not link:
                return False
            offer.link = None
        self.end(key)
        return True

    def export(self, key: str, first: int, count: int) -> tuple[bytes, list[int]]:
        """File and offset of pages, and their files with the lease's lock behind them."""
        with self._lock:
            offer = self.standing.get(key)
            if offer is None or not 0 < count <= wire.BATCH_PAGES:
                raise HandoverError("the offer is over")
            offer.reading = True
            pages = offer.pages[first : first + count].tolist()
            files, places = _core.export_pages(self._source.cache, pages)
        try:
            files.append(_core.share_liveness(self._source.client))
        except KvcachedError:
            wire.close_all(files)
            raise
        return wire.pack_pairs(places), files


def _due_s(offer: _Open) -> float:
    return offer.until_s + (GRACE_S if offer.reading else 0.0)
