"""A stock engine's share of a device: the part of its settings that every adapter applies."""

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

START_S = 10.0  # wait for other engines' memory at the start
FIND_S = 0.1  # wait for other engines' memory in a step
ASK_AGAIN_S = 0.2  # interval between requests to other engines


class DeviceShare:
    """Client of one engine process. Thread rule: the thread that steps the engine."""

    def __init__(self, settings: Settings, name: str) -> None:
        """Opens the device and registers the client.

        `name` is used if the settings have none. Raises the errors of Device.open and
        Device.client.
        """
        self.settings = settings
        self.device = settings.open_device()
        self.client = self.device.client(settings.name or name, limit_bytes=settings.limit_bytes)
        self._lease: StaticLease | None = None
        self._min_bytes = 0  # of one request, in the pools so far
        self._ask_at_s = self._wait_at_s = 0.0

    def lease_static(self, measured_bytes: int) -> None:
        """Leases the engine's memory other than KV: the size in the settings, or as measured."""
        size_bytes = self.settings.static_bytes or measured_bytes
        try:
            self._lease = self._reserve(size_bytes, "weights and workspaces")
        except NoRoomError as error:
            raise NoRoomError(
                f"{self.client.name} needs {format_size(size_bytes)} in addition to its KV, but "
                f"{self.device.name} has {format_size(error.free_bytes)} available: stop or "
                "shrink another engine, or correct KVCACHED_STATIC",
                size_bytes,
                error.free_bytes,
            ) from error

    def alloc_kvcache(self, layout: KVLayout, num_tokens: int, request_tokens: int) -> KVCache:
        """Reserves KV space and guarantees the settings' minimum, or one request of
        `request_tokens`. A model with several pools calls it for each.

        Raises NoRoomError.
        """
        need_bytes = self._min_bytes + layout.need_bytes(request_tokens, self.device.page_bytes)
        # With large pages one request fills only part of a slab.
        least_bytes = (request_tokens + layout.block_tokens) * layout.token_bytes
        wasteful = need_bytes - self._min_bytes > 2 * least_bytes
        self._min_bytes = need_bytes
        self._guarantee(self.settings.min_bytes or need_bytes, request_tokens, wasteful)
        kv = self.client.alloc_kvcache(layout, num_tokens)
        # Keeps one slab between steps. Otherwise a block at its edge maps and unmaps it each time.
        kv.set_spare_pages(0, sum(layout.slab_pages(self.device.page_bytes)))
        return kv

    def ask_for(self, size_bytes: int, more_bytes: int = 0) -> None:
        """Asks other engines for `size_bytes` of KV that do not fit, and returns at once.

        `more_bytes` is what this engine could use in addition, within its own limit.
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
        """Returns blocks that a step needs, or None.

        If they do not fit now, waits for `FIND_S` if other engines have memory to give. After a
        failure it does not wait again until `ASK_AGAIN_S` have passed.
        """
        # With several ranks each calls this, also those that do have room.
        ids = kv.alloc_kv(num_blocks)
        if ids is not None or time.monotonic() < self._wait_at_s:
            return ids
        pages = kv.missing_pages(num_blocks)
        if pages is None or not self._others_could_give(pages * self.device.page_bytes):
            return None
        ids = kv.alloc_kv(num_blocks, wait_s=FIND_S)
        if ids is None:
            self._wait_at_s = time.monotonic() + ASK_AGAIN_S
        return ids

    def _others_could_give(self, size_bytes: int) -> bool:
        """Returns whether another client has memory to give, and this one's limit allows more."""
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
                f"{what} needs {format_size(size_bytes)}, but KVCACHED_LIMIT is "
                f"{format_size(limit_bytes)}: raise the limit, or {less}",
                size_bytes,
                limit_bytes,
            )
        try:
            # The lease keeps memory that others give for this client.
            self._reserve(size_bytes - self.client.usage().min_bytes, what).release()
            self.client.set_min(size_bytes)
        except NoRoomError as error:
            raise NoRoomError(
                f"{what} needs {format_size(size_bytes)}, but {self.device.name} has "
                f"{format_size(error.free_bytes)} available: stop or shrink another engine, or "
                f"{less}",
                size_bytes,
                error.free_bytes,
            ) from error

    def _reserve(self, size_bytes: int, what: str) -> StaticLease:
        """Leases memory, waiting for others to shrink unless it exceeds the whole device."""
        wait_s = START_S if size_bytes <= self.device.capacity_bytes else 0.0
        return self.client.reserve_static(size_bytes, what, wait_s=wait_s)


def weights_bytes(model: Any) -> int:
    """Returns the bytes of a torch module's tensors, each counted once."""
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())
