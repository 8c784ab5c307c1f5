"""Interface that SGLang's pool and allocator on kvcached need from their engine."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcached import KVCache, KVLayout, RankKV

Ids = NDArray[np.int64]
Pool = Literal["full", "window", "state"]


class PoolMemory(Protocol):
    """KV memory of one model. Thread rule: the engine's thread."""

    def pool_bytes(self, context_tokens: int, window_tokens: int) -> int:
        """Returns the size of the pool that SGLang lays out: addresses, whatever is free now.

        A request has up to `context_tokens`, and up to `window_tokens` in layers with a window.

        SGLang's own measurement would limit a model, for its whole life, to what other engines left
        free when it started.
        """

    def kv_cache(self, layout: KVLayout, num_tokens: int, pool: Pool = "full") -> KVCache:
        """Returns the space for a pool of this geometry, which SGLang views by layer.

        "full" has the tokens of every layer without a window, "window" those of the layers with
        one, "state" one token for the state of a sequence.

        Raises NoRoomError, and RuntimeError or NotImplementedError for an unsupported geometry.
        """

    def rank_kv(self, kv: KVCache) -> RankKV:
        """Returns a space of `kv_cache` for use by one rank of the engine."""

    def least(self, value: int) -> int:
        """Returns the smallest of all ranks' values: a collective."""

    def report_shortage(self, num_tokens: int) -> None:
        """Reports that a request waits for `num_tokens` more tokens of memory. Returns at once."""

    def find_room(self, kv: KVCache, num_blocks: int) -> Ids | None:
        """Returns blocks of `kv` that a step needs after its own prefix cache is evicted, or None.

        Other engines give the memory. None if they have none to give, or did not give it shortly.
        """


def active_memory() -> PoolMemory:
    """Returns the memory that the platform holds for the model being served.

    SGLang builds pools and allocators from the platform's classes, so the platform is the only way
    to pass this memory to them. Raises RuntimeError without such a memory.
    """
    from sglang.srt.platforms import current_platform

    memory: PoolMemory | None = getattr(current_platform, "memory", None)
    if memory is None:
        raise RuntimeError("the platform does not have engine memory: no model is being started")
    return memory
