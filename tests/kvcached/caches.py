"""Prefix cache, as an engine has one. Imported by worker.py as well."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcached import KVCache


class Cache:
    """Blocks that no request uses, in the order in which they were last used."""

    def __init__(self, kv: KVCache, ids: NDArray[np.int64]) -> None:
        self.kv = kv
        self.ids = ids

    def evictable(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.ids, np.arange(len(self.ids))

    def evict(self, ids: NDArray[np.int64]) -> int:
        self.kv.free_kv(ids)
        self.ids = np.setdiff1d(self.ids, ids)
        return len(ids) * self.kv.layout.block_tokens
