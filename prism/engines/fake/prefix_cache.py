"""Prefix cache: blocks of finished sequences, found by their tokens.

A block's key is the hash of its tokens and of the previous key, so equal keys mean equal prefixes.
Users of a block are counted; blocks without users are kept in least-recently-used order.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

Key = bytes


def block_keys(token_ids: Sequence[int], block_tokens: int) -> Iterator[Key]:
    """Yields the keys of the whole blocks of a sequence, first to last."""
    key = b""
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        tokens = np.asarray(token_ids[start : start + block_tokens], dtype="<i8").tobytes()
        key = hashlib.blake2b(key + tokens, digest_size=16).digest()
        yield key


class BlockCache:
    """Cache of block ids; the caller owns their memory. Not thread-safe."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def idle_blocks(self) -> int:
        return len(self._idle)

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the blocks of the longest cached prefix. The caller becomes a user of each."""
        taken: list[int] = []
        for key in block_keys(token_ids, self._block_tokens):
            block = self._block_of.get(key)
            if block is None:
                break
            self._users[block] += 1
            self._idle.pop(block, None)
            taken.append(block)
        return taken

    def give(self, token_ids: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Ends the caller's use of `blocks`, which hold `token_ids`; whole blocks stay cached.

        Returns the blocks that are not cached (the partial last one, duplicates), for the caller to
        free. The end of a prefix is evicted first, since it is useless without its start.
        """
        keys = list(block_keys(token_ids, self._block_tokens))
        unkept = list(blocks[len(keys) :])
        for key, block in reversed(list(zip(keys, blocks, strict=False))):
            if block in self._key_of:
                self._release(block)
            elif key in self._block_of:
                unkept.append(block)
            else:
                self._block_of[key] = block
                self._key_of[block] = key
                self._users[block] = 0
                self._idle[block] = None
        return unkept

    def evict(self, count: int) -> list[int]:
        """Removes up to `count` idle blocks, least recently used first. Returns them for the caller
        to free."""
        blocks = list(islice(self._idle, count))
        self.forget(blocks)
        return blocks

    def idle(self) -> Iterator[int]:
        """Returns the blocks without a user, least recently used first."""
        return iter(self._idle)

    def forget(self, blocks: Sequence[int]) -> None:
        """Removes these idle blocks from the cache, for the caller to free."""
        for block in blocks:
            del self._idle[block], self._users[block]
            del self._block_of[self._key_of.pop(block)]

    def _release(self, block: int) -> None:
        self._users[block] -= 1
        if self._users[block] == 0:
            self._idle[block] = None
