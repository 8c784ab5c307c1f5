"""vLLM's worker of one rank of several, in a process apart from the scheduler's.

The scheduler plans with block numbers (`rank_blocks`). Each rank takes blocks from its own device,
whose ids differ from rank to rank, and translates the numbers of each step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcached import KVCache, Shrunk
from kvcached.engines.vllm.cpu_worker import ElasticCPUWorker
from kvcached.engines.vllm.worker import renumber
from kvcached.engines.wake_socket import RequestWatch
from kvcached.layouts import KVLayout

_NOT_HELD = -1


class RankWorker(ElasticCPUWorker):
    """Worker whose blocks the scheduler's process takes and frees by calls to all ranks."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        self._own_ids = np.full(self._kv.num_blocks, _NOT_HELD, dtype=np.int64)
        self._own_ids[0] = 0  # of padding
        self._watch: RequestWatch | None = None
        self._request: Any = None
        self._held_bytes = 0

    @property
    def _kv(self) -> KVCache:
        kv: KVCache | None = self._memory.kv
        if kv is None:
            raise RuntimeError("vLLM has not allocated its KV cache yet")
        return kv

    # --- calls of the scheduler's process ----------------------------------------------------

    def describe_blocks(self) -> tuple[int, KVLayout, int]:
        """Returns the number of blocks, their layout, and the bytes of the floor."""
        return self._kv.num_blocks, self._kv.layout, self._kv.floor_bytes()

    def available_blocks(self) -> int:
        return self._kv.available_blocks()

    def take_blocks(self, numbers: list[int], find: bool) -> bool:
        """Takes blocks for these numbers. Returns False, and takes none, if they do not fit.

        `find` waits shortly for other engines to make room.
        """
        if find:
            ids = self._memory.share.find_room(self._kv, len(numbers))
        else:
            ids = self._kv.alloc_kv(len(numbers))
        if ids is not None:
            self._own_ids[numbers] = ids
        return ids is not None

    def free_blocks(self, numbers: list[int]) -> None:
        """Frees the blocks of these numbers, as far as this rank has them."""
        ids = self._own_ids[numbers]
        self._kv.free_kv(ids[ids != _NOT_HELD])
        self._own_ids[numbers] = _NOT_HELD

    def mapped_bytes(self) -> int:
        return self._kv.mapped_bytes()

    def trim_blocks(self) -> int:
        """Returns spare pages to the device. Returns the bytes that are still mapped."""
        self._kv.trim()
        return self._kv.mapped_bytes()

    def ask_for(self, size_bytes: int, more_bytes: int) -> None:
        self._memory.share.ask_for(size_bytes, more_bytes)

    def publish_evictable(self, size_bytes: int) -> None:
        mapped_bytes = self._kv.mapped_bytes() - self._kv.floor_bytes()
        self._memory.publish_evictable(min(size_bytes, max(0, mapped_bytes)))

    def watch_requests(self, number: int) -> None:
        """Wakes the scheduler's process, whose socket has this number, when others ask."""
        self._watch = RequestWatch(self._memory.share.client, number)

    def open_request(self) -> int | None:
        """Returns the bytes that other engines ask of this rank. None: all it can give."""
        self._request = self._memory.share.client.shrink_request()
        self._held_bytes = self._kv.mapped_bytes()
        return 0 if self._request is None else self._request.size_bytes

    def answer_request(self, evicted_tokens: int) -> None:
        """Answers the request of `open_request` by what was returned since then."""
        if self._request is not None:
            returned_bytes = max(0, self._held_bytes - self._kv.mapped_bytes())
            evicted_bytes = returned_bytes if evicted_tokens else 0
            shrunk = Shrunk(returned_bytes, evicted_tokens, evicted_bytes)
            self._memory.share.client.answer(self._request, shrunk)
            self._request = None
        if self._watch is not None:
            self._watch.notify_answered()

    # --- steps -------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any) -> Any:
        """Runs a step. The plan is this process's copy."""
        renumber(scheduler_output, self._own)
        return super().execute_model(scheduler_output)

    def _own(self, groups: tuple[list[int], ...]) -> tuple[list[int], ...]:
        return tuple(self._own_ids[group].tolist() if group else [] for group in groups)
