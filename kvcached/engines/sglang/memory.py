"""What SGLang's pool and allocator need from the engine that they serve."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcached import KVCache, Layout, RankKV

Ids = NDArray[np.int64]


class PoolMemory(Protocol):
    """The KV memory of one model. Thread rule: the engine's thread."""

    def pool_bytes(self, context_tokens: int) -> int:
        """What SGLang may lay out for its pool: addresses, whatever is free at the moment. Its own
        measure would cap a model for its whole life at what its neighbours left when it came up.
        """

    def kv_cache(self, layout: Layout, num_tokens: int) -> KVCache:
        """The space for a pool of this geometry, which SGLang sees per layer. Raises NoRoomError,
        RuntimeError or NotImplementedError for a geometry that this engine cannot serve."""

    def rank_kv(self) -> RankKV:
        """That space, as one rank of the engine must use it."""

    def least(self, value: int) -> int:
        """The smallest of all ranks' values: a collective."""

    def lacks(self, num_tokens: int) -> None:
        """Told that a request waits since so many more tokens have no room. Returns at once."""

    def find_room(self, num_blocks: int) -> Ids | None:
        """So many blocks, which others made room for: a step lacks them, its own prefix cache gone.
        None if others have nothing to give, or within a moment did not."""


def active_memory() -> PoolMemory:
    """The memory that the platform holds for the model being served.

    SGLang builds pools and allocators from the platform's classes alone, so what they need can
    reach them only through the platform.
    """
    from sglang.srt.platforms import current_platform

    memory: PoolMemory | None = getattr(current_platform, "memory", None)
    if memory is None:
        raise RuntimeError("no model is being brought up: the platform holds no engine memory")
    return memory
