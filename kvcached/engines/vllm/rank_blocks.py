"""Blocks of several ranks, as vLLM's scheduler sees them.

vLLM's scheduler runs in a process without KV, and each rank in another one (`rank_worker`). So
blocks are taken and freed by calls to all ranks: each rank gets a block for a number, or none does.
vLLM sends these calls in the order of the steps.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from kvcached import PrefixCache, Shrunk
from kvcached.engines import wake_socket
from kvcached.engines.vllm.memory import use_memory, watch_input
from kvcached.layouts import KVLayout

Ids = NDArray[np.int64]
Call = Callable[..., list[Any]]


class RankExecutor(MultiprocExecutor):  # type: ignore[misc]
    """vLLM's executor of several processes, which gives its ranks' blocks to the scheduler."""

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        super().initialize_from_config(kv_cache_configs)
        memory: Any = RankMemory(self._call)  # the part that the scheduler uses
        use_memory(memory)

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Returns the results of all ranks. Raises RuntimeError if one fails or is gone."""
        results: list[Any] = self.collective_rpc(method, args=args)
        return results


class RankBlocks:
    """The calls of `KVCache` that vLLM's block pool makes, on all ranks.

    Raises RuntimeError if the ranks do not have the same blocks.
    """

    def __init__(self, call: Call) -> None:
        described = call("describe_blocks")
        self.num_blocks: int
        self.layout: KVLayout
        self._floor_bytes: int
        self.num_blocks, self.layout, self._floor_bytes = described[0]
        if any(each != described[0] for each in described):
            raise RuntimeError(
                "the ranks' devices do not have pages of one size: set KVCACHED_PAGE before their "
                "first engines"
            )
        self._call = call
        self._block_bytes = self.layout.block_tokens * self.layout.buffer_token_bytes[0]
        self._free = list(range(self.num_blocks - 1, 0, -1))
        self._untrimmed = False

    def available_blocks(self) -> int:
        """Returns the number of blocks that every rank would grant now."""
        return int(min(*self._call("available_blocks"), len(self._free)))

    def alloc_kv(self, num_blocks: int) -> Ids | None:
        """Returns numbers of blocks that every rank has taken, or None without room on one."""
        return self._take(num_blocks, find=False)

    def find_room(self, num_blocks: int) -> Ids | None:
        """Returns what `alloc_kv` does, after the devices' other engines have shortly made room."""
        return self._take(num_blocks, find=True)

    def _take(self, num_blocks: int, find: bool) -> Ids | None:
        if num_blocks > len(self._free):
            return None
        numbers = self._free[-num_blocks:]
        if not all(self._call("take_blocks", numbers, find)):
            self._call("free_blocks", numbers)
            return None
        del self._free[-num_blocks:]
        return np.array(numbers, dtype=np.int64)

    def free_kv(self, ids: Ids) -> None:
        numbers = ids.tolist()
        self._call("free_blocks", numbers)
        self._free += numbers
        self._untrimmed = True

    def live_blocks(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    def floor_bytes(self) -> int:
        return self._floor_bytes

    def mapped_bytes(self) -> int:
        """Returns the bytes of the floor and of live blocks; a rank may have more mapped."""
        return self.floor_bytes() + self.live_blocks() * self._block_bytes

    def trim(self) -> None:
        """Returns spare pages of all ranks, if blocks were freed since the last call."""
        if self._untrimmed:
            self._call("trim_blocks")
            self._untrimmed = False

    def shrink(self, size_bytes: int | None, cache: PrefixCache) -> Shrunk:
        """Returns spare pages, then evicts blocks, the least recently used first.

        Stops when every rank has returned `size_bytes` (None: all it can). Returns the bytes of the
        rank that has returned the least.
        """
        before, evicted_tokens = self._call("mapped_bytes"), 0
        while True:
            mapped = zip(before, self._call("trim_blocks"), strict=True)
            returned_bytes = max(0, min(old - now for old, now in mapped))
            ids, _ = cache.evictable()
            if size_bytes is not None:
                ids = ids[: max(0, -(-(size_bytes - returned_bytes) // self._block_bytes))]
            if len(ids) == 0:
                return Shrunk(returned_bytes, evicted_tokens)
            # A page may hold other blocks than the evicted ones, so there may be several rounds.
            evicted_tokens += cache.evict(ids)


class RankMemory:
    """Memory of all ranks, and also their share (`kvcached.engines.vllm.memory.Memory`).

    Thread rule: the thread that steps the engine.
    """

    def __init__(self, call: Call) -> None:
        self.kv = RankBlocks(call)
        self._call = call
        self._asked = threading.Event()
        self._published_bytes = 0

    @property
    def share(self) -> RankMemory:
        return self

    def find_room(self, kv: RankBlocks, num_blocks: int) -> Ids | None:
        return kv.find_room(num_blocks)

    def ask_for(self, size_bytes: int, more_bytes: int = 0) -> None:
        """Asks others on every rank's device, as far as its memory does not suffice."""
        self._call("ask_for", size_bytes, more_bytes)

    def publish_evictable(self, size_bytes: int) -> None:
        """Publishes the bytes that could be evicted on each rank, if they have changed."""
        if size_bytes != self._published_bytes:
            self._call("publish_evictable", size_bytes)
            self._published_bytes = size_bytes

    def answer_requests(self, shrink: Callable[[int | None], Shrunk]) -> None:
        """Answers the largest request of any rank on all ranks. Costs no call without a request."""
        if not self._asked.is_set():
            return
        self._asked.clear()
        wanted = self._call("open_request")
        size_bytes = None if None in wanted else max(wanted)
        shrunk = Shrunk() if size_bytes == 0 else shrink(size_bytes)
        self._call("answer_request", shrunk.evicted_tokens)

    def wake_on_requests(self, wake: Callable[[], None]) -> None:
        """Calls `wake` on a separate thread when other engines send requests to a rank. See
        `watch_input`."""
        number = secrets.randbelow(wake_socket.NUMBER_MAX)
        bound = wake_socket.bound_socket(number)

        def drain_and_wake() -> None:
            wake_socket.drain(bound)
            self._asked.set()
            wake()

        watch_input(bound.fileno(), drain_and_wake)
        self._call("watch_requests", number)
