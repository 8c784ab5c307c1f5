"""What `KVCache.offer_kv` returns. Serving it is elsewhere: that imports sockets and threads."""

from __future__ import annotations

from collections.abc import Callable


class Offer:
    """Blocks that wait to be fetched, made by `KVCache.offer_kv`.

    `address` is what the other process gives to `KVCache.fetch_kv`: any string transport will do.
    Until the offer is over its blocks stay as they are, freed by their owner or not.
    """

    def __init__(self, address: str, is_open: Callable[[], bool], end: Callable[[], None]) -> None:
        self.address = address
        self._is_open = is_open
        self._end = end

    def is_open(self) -> bool:
        """Whether the offer stands: not fetched, not withdrawn, in time, and its fetcher lives."""
        return self._is_open()

    def withdraw(self) -> None:
        """Ends the offer; a fetch under way fails. Does nothing if the offer is over."""
        self._end()
