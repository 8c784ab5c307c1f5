"""A stock engine's stake in a device: what every adapter of one does with its settings."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvcached.client import StaticLease
from kvcached.engines.settings import Settings
from kvcached.errors import NoRoomError
from kvcached.kvcache import KVCache
from kvcached.layouts import KVLayout
from kvcached.tools.sizes import format_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# How long other engines have to give memory to one that starts, and to a step; and after how long
# they are asked again.
START_S = 10.0
FIND_S = 0.1
ASK_AGAIN_S = 0.2


class Stake:
    """The client of one engine process. Thread rule: the thread that steps the engine."""

    def __init__(self, settings: Settings, name: str) -> None:
        """`name` is the client's where the settings have none. Raises what Device.open and
        Device.client raise."""
        self.settings = settings
        self.device = settings.open_device()
        self.client = self.device.client(settings.name or name, limit_bytes=settings.limit_bytes)
        self._lease: StaticLease | None = None
        self._ask_at_s = self._wait_at_s = 0.0

    def lease_static(self, measured_bytes: int) -> None:
        """Leases what the engine takes beside its KV: as the settings say, or as measured."""
        size_bytes = self.settings.static_bytes or measured_bytes
        try:
            self._lease = self._reserve(size_bytes, "weights and workspaces")
        except NoRoomError as error:
            raise NoRoomError(
                f"{self.client.name} takes {format_size(size_bytes)} beside its KV, and "
                f"{self.device.name} has {format_size(error.free_bytes)} for it: stop or shrink "
                "another engine, or correct KVCACHED_STATIC",
                size_bytes,
                error.free_bytes,
            ) from error

    def alloc_kvcache(self, layout: KVLayout, num_tokens: int, request_tokens: int) -> KVCache:
        """The KV space, of which one request of `request_tokens` is guaranteed, or what the
        settings say. Raises NoRoomError."""
        need_bytes = layout.need_bytes(request_tokens, self.device.page_bytes)
        # Large pages make slabs of which a request fills a part.
        wasteful = need_bytes > 2 * (request_tokens + layout.block_tokens) * layout.token_bytes
        self._guarantee(self.settings.min_bytes or need_bytes, request_tokens, wasteful)
        kv = self.client.alloc_kvcache(layout, num_tokens)
        # One slab is kept between steps, or a block on the edge maps and unmaps it each time.
        kv.set_spare_pages(0, sum(layout.slab_pages(self.device.page_bytes)))
        return kv

    def ask_for(self, size_bytes: int, more_bytes: int = 0) -> None:
        """Asks other engines for so much more KV than there is room for, and returns at once.

        `more_bytes`: what this engine would use besides, as far as its own limit lets it.
        """
        now_s = time.monotonic()
        if now_s >= self._ask_at_s and self._others_could_give(size_bytes):
            self._ask_at_s = now_s + ASK_AGAIN_S
            mine = self.client.usage()
            if mine.limit_bytes is not None:
                left_bytes = mine.limit_bytes - mine.reserved_bytes - size_bytes
                more_bytes = max(0, min(more_bytes, left_bytes))
            self.device.request_room(size_bytes + more_bytes, for_client=self.client.name)

    def find_room(self, kv: KVCache, num_blocks: int) -> NDArray[np.int64] | None:
        """Blocks that a step lacks. Waits for a moment if others have what they could do without;
        if that is in vain, not again before `ASK_AGAIN_S`."""
        if time.monotonic() < self._wait_at_s:
            return None
        pages = kv.missing_pages(num_blocks)
        if pages is None or not self._others_could_give(pages * self.device.page_bytes):
            return None
        ids = kv.alloc_kv(num_blocks, wait_s=FIND_S)
        if ids is None:
            self._wait_at_s = time.monotonic() + ASK_AGAIN_S
        return ids

    def _others_could_give(self, size_bytes: int) -> bool:
        """Something at least, to a client whose own limit is not what keeps it small."""
        usage, mine = self.device.usage(), self.client.usage()
        limit_bytes = mine.limit_bytes
        if limit_bytes is not None and mine.reserved_bytes + size_bytes > limit_bytes:
            return False
        others = (client for client in usage.clients if client.number != mine.number)
        return any(client.spare_bytes + client.evictable_bytes > 0 for client in others)

    def _guarantee(self, size_bytes: int, request_tokens: int, wasteful: bool) -> None:
        limit_bytes, asked = self.settings.limit_bytes, self.settings.min_bytes is not None
        what = "KVCACHED_MINIMUM" if asked else f"the KV of one request of {request_tokens} tokens"
        less = "lower it" if asked else "shorten the model's context, or set KVCACHED_MINIMUM"
        if wasteful and not asked:
            less = f"lower KVCACHED_PAGE for all (it is {format_size(self.device.page_bytes)})"
        if limit_bytes is not None and size_bytes > limit_bytes:
            raise NoRoomError(
                f"{what} takes {format_size(size_bytes)} and KVCACHED_LIMIT is "
                f"{format_size(limit_bytes)}: raise the limit, or {less}",
                size_bytes,
                limit_bytes,
            )
        try:
            # What comes free while others give is kept for this client.
            self._reserve(size_bytes, what).release()
            self.client.set_min(size_bytes)
        except NoRoomError as error:
            raise NoRoomError(
                f"{what} takes {format_size(size_bytes)}, and {self.device.name} has "
                f"{format_size(error.free_bytes)} for it: stop or shrink another engine, or {less}",
                size_bytes,
                error.free_bytes,
            ) from error

    def _reserve(self, size_bytes: int, what: str) -> StaticLease:
        """Asks others and waits, unless all of the device were too little."""
        wait_s = START_S if size_bytes <= self.device.capacity_bytes else 0.0
        return self.client.reserve_static(size_bytes, what, wait_s=wait_s)


def weights_bytes(model: Any) -> int:
    """Of a torch module's tensors, each counted once."""
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())
