"""Offering end: keeps blocks unchanged until another process has fetched them."""

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
from kvcached.handover.offer_server import OfferServer
from kvcached.handover.plan import LocalCache, pages_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]

GRACE_S = 1.0
"""Additional time of an offer whose pages are being read at its deadline."""
CHECK_S = 60.0


@dataclass(slots=True, eq=False)
class _Open:
    """An open offer."""

    ids: Ids
    pages: Ids
    until_s: float
    link: socket.socket | None = None
    """Connection of the fetching process."""
    reading: bool = False
    """True once pages were exported."""


class Offers:
    """All offers of one KV cache, and the thread that serves them while there are any.

    `active` holds the open offers by key; it is read without the lock where a free must cost
    nothing. free(ids) returns blocks to the cache, from either thread. Thread rule: the cache's
    thread.
    """

    def __init__(self, source: LocalCache, free: Callable[[Ids], None]) -> None:
        self._source = source
        self._free = free
        self._lock = threading.Lock()
        self.active: dict[str, _Open] = {}
        self._freed: set[int] = set()
        self._server: OfferServer | None = None

    def add(self, ids: Ids, deadline_s: float) -> Offer:
        """Opens an offer. Raises HandoverError if it cannot be served.

        REQUIRES: live blocks, each once.
        """
        pages = pages_of(self._source.shape, ids)
        _core.wait_for_streams(self._source.client)  # so that their writes are in the blocks
        # Exports one page to raise early: the driver shares no memory, or the client is closed.
        wire.close_all(_core.export_pages(self._source.cache, pages[:1].tolist())[0])
        key = os.urandom(8).hex()
        with self._lock:
            if self._server is None:
                self._server = self._serve()
            self.active[key] = _Open(ids.copy(), pages, time.monotonic() + deadline_s)
            self._server.wake()
            name = self._server.name
        return Offer(f"{name}/{key}", lambda: key in self.active, lambda: self.end(key))

    def _serve(self) -> OfferServer:
        """Starts the server. Its thread waits for the lock, which the caller holds."""
        try:
            return OfferServer(self)
        except (OSError, RuntimeError) as error:
            raise HandoverError(f"blocks cannot be offered: {error}") from error

    def __len__(self) -> int:
        """Returns the number of open offers. The blocks of any other offer are released."""
        self.expire()
        with self._lock:
            return len(self.active)

    def keep(self, ids: Ids) -> Ids:
        """Returns the freed blocks that no offer holds. The others are freed when their offers end.

        Raises KeyError with a block that was freed before.
        """
        import numpy as np

        self.expire()
        with self._lock:
            if not self.active:
                return ids
            offered = np.concatenate([offer.ids for offer in self.active.values()])
            held = np.isin(ids, offered)
            later = {int(i) for i in ids[held]}
            if again := later & self._freed:
                raise KeyError(min(again))
            self._freed |= later
            return ids[~held]

    def end(self, key: str) -> None:
        """Ends an offer, and frees those of its blocks that their owner has freed. Any thread."""
        import numpy as np

        with self._lock:
            offer = self.active.get(key)
            if offer is None:
                return
            if offer.link is not None:
                with contextlib.suppress(OSError):  # the other end has closed it
                    offer.link.shutdown(socket.SHUT_RDWR)
            others = [each for each in self.active.values() if each is not offer]
            still = {int(i) for each in others for i in each.ids}
            gone = ({int(i) for i in offer.ids} & self._freed) - still
            self._freed -= gone
            if gone:
                with contextlib.suppress(ClosedError):  # then the cache has released them
                    self._free(np.array(sorted(gone), dtype=np.int64))
            del self.active[key]  # last: without an offer the cache alone decides on the blocks
            if self._server is not None:
                self._server.wake()

    def close(self) -> None:
        """Ends all offers."""
        server = self._server
        for key in list(self.active):
            self.end(key)
        if server is not None:
            server.join()

    # --- the serving thread ----------------------------------------------------------------

    def end_if_unused(self) -> bool:
        """Returns whether the serving thread ends because no offer is open. The next offer starts
        another.
        """
        with self._lock:
            if not self.active:
                self._server = None
            return not self.active

    def abandon(self) -> None:
        """Ends all offers because the serving thread fails."""
        with self._lock:
            self._server = None
            keys = list(self.active)
        for key in keys:
            self.end(key)

    def expire(self) -> float:
        """Ends the offers whose time has expired. Any thread.

        Returns the seconds until the next one expires, or `CHECK_S`.
        """
        now_s = time.monotonic()
        late = [key for key, offer in list(self.active.items()) if _due_s(offer) <= now_s]
        for key in late:
            self.end(key)
        return min((_due_s(o) - now_s for o in list(self.active.values())), default=CHECK_S)

    def terms(self, hello: wire.Hello, link: socket.socket) -> tuple[wire.OfferTerms, Ids | None]:
        """Returns the answer to a request for a key: terms, and the ids of the blocks."""
        source, shape = self._source, self._source.shape
        if hello.version != wire.VERSION:
            return wire.OfferTerms(f"this end supports version {wire.VERSION}"), None
        if not _core.can_share_with(source.client, hello.on_gpu, hello.ordinal):
            self.end(hello.key)  # an offer is for one fetcher
            return wire.OfferTerms("the fetching device cannot read this device's memory"), None
        with self._lock:
            offer = self.active.get(hello.key)
            if offer is None or offer.link is not None:
                return wire.OfferTerms("the offer has ended, or is being fetched"), None
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
        """Ends an offer that was fetched. Returns whether it was open until now."""
        with self._lock:
            offer = self.active.get(key)
            if offer is None or offer.link is not link:
                return False
            offer.link = None
        self.end(key)
        return True

    def export(self, key: str, first: int, count: int) -> tuple[bytes, list[int]]:
        """Returns the file and offset of pages, and their files followed by the lease's lock."""
        with self._lock:
            offer = self.active.get(key)
            if offer is None or not 0 < count <= wire.BATCH_PAGES:
                raise HandoverError("the offer has ended")
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
