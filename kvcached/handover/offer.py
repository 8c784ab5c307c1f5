"""Result of `KVCache.offer_kv`, in a module without the sockets and threads that serve it."""

from __future__ import annotations

from collections.abc import Callable


class Offer:
    """Blocks that another process may fetch, made by `KVCache.offer_kv`.

    The other process passes `address` to `KVCache.fetch_kv`; any transport of strings will do.
    Until the offer ends its blocks keep their contents, even if their owner frees them.
    """

    def __init__(self, address: str, is_open: Callable[[], bool], end: Callable[[], None]) -> None:
        self.address = address
        self._is_open = is_open
        self._end = end

    def is_open(self) -> bool:
        """Returns whether the offer can still be fetched.

        False once it is fetched, withdrawn or expired, or its fetcher has died.
        """
        return self._is_open()

    def withdraw(self) -> None:
        """Ends the offer; a running fetch fails. Does nothing if the offer has ended."""
        self._end()
