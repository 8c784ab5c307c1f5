"""Prefix cache of an engine (Mooncake's block hashes).

A trace identifies each 512-token block of a prompt by an id; equal ids mean equal tokens. The key
of a block is its id and the block before it, so prompts share their common prefix. Only whole
blocks are cached: a partly filled last block is always computed.
"""

from __future__ import annotations

from collections.abc import Sequence

HASH_TOKENS = 512


class Block:
    """One block of a prompt."""

    __slots__ = ("key", "number", "users")

    def __init__(self, key: tuple[int, int], number: int) -> None:
        # (number of the block before it, id).
        self.key = key
        self.number = number
        # Number of requests in the engine whose prompt contains the block.
        self.users = 0


class SimPrefixCache:
    """Cached blocks of one engine.

    A request uses a block together with all blocks before it, and releases the last one first. The
    unused blocks, in order of release, therefore have the end of a prompt before its beginning:
    dropping the oldest block never makes another one unreachable.
    """

    def __init__(self, kv_blocks: int) -> None:
        # Number of KV blocks that one prompt block fills.
        self.kv_blocks = kv_blocks
        self._known: dict[tuple[int, int], Block] = {}
        self._idle: dict[Block, float] = {}
        self._made = 0

    def __len__(self) -> int:
        return len(self._known)

    @property
    def idle_blocks(self) -> int:
        """Number of KV blocks of the unused blocks."""
        return len(self._idle) * self.kv_blocks

    @property
    def oldest_s(self) -> float:
        """Time at which the least recently used block was released; infinite without one."""
        return next(iter(self._idle.values()), float("inf"))

    def use(self, hashes: Sequence[int], most: int) -> list[Block]:
        """Returns the longest cached prefix of a prompt, of at most `most` blocks. The blocks stay
        cached until `leave`."""
        chain: list[Block] = []
        before = 0
        for found in hashes[:most]:
            block = self._known.get((before, found))
            if block is None:
                break
            self._hold(block)
            chain.append(block)
            before = block.number
        return chain

    def extend(self, chain: list[Block], hashes: Sequence[int]) -> int:
        """Adds the remaining blocks of a computed prompt to the cache and to `chain`. Returns the
        number of blocks that another request had added in the meantime."""
        duplicates = 0
        before = chain[-1].number if chain else 0
        for found in hashes[len(chain) :]:
            key = (before, found)
            block = self._known.get(key)
            if block is None:
                self._made += 1
                block = self._known[key] = Block(key, self._made)
            else:
                duplicates += 1
            self._hold(block)
            chain.append(block)
            before = block.number
        return duplicates

    def leave(self, chain: list[Block], now_s: float) -> None:
        """Releases the blocks of `chain` and empties it."""
        for block in reversed(chain):
            block.users -= 1
            if block.users == 0:
                self._idle[block] = now_s
        chain.clear()

    def drop(self) -> None:
        """Drops the least recently used block. REQUIRES: one is unused."""
        block = next(iter(self._idle))
        del self._idle[block], self._known[block.key]

    def _hold(self, block: Block) -> None:
        if block.users == 0:
            self._idle.pop(block, None)
        block.users += 1
