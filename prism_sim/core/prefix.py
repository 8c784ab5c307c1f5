"""Prompt prefixes that an engine keeps for later requests (Mooncake's block hashes).

A trace names each 512-token block of a prompt by an id; equal ids mean equal tokens. A block is
known by its id and the block before it, so that a prompt shares what its beginning has in common
with others. Only whole blocks are kept: the last, partly filled one is always computed.
"""

from __future__ import annotations

from collections.abc import Sequence

HASH_TOKENS = 512


class Block:
    """One block of prompt. users: requests in the engine whose prompt it is part of."""

    __slots__ = ("key", "number", "users")

    def __init__(self, key: tuple[int, int], number: int) -> None:
        self.key = key
        self.number = number
        self.users = 0


class SimPrefixCache:
    """Which blocks an engine has. kv_blocks: KV blocks that one of them fills.

    A request uses a block together with all blocks before it, and leaves the last one first. So the
    unused blocks, in the order in which they were left, have later parts of a prompt before its
    beginning: dropping the oldest never leaves a block that cannot be reached.
    """

    def __init__(self, kv_blocks: int) -> None:
        self.kv_blocks = kv_blocks
        self._known: dict[tuple[int, int], Block] = {}
        self._idle: dict[Block, float] = {}
        self._made = 0

    def __len__(self) -> int:
        return len(self._known)

    @property
    def idle_blocks(self) -> int:
        """KV blocks of the unused blocks."""
        return len(self._idle) * self.kv_blocks

    @property
    def oldest_s(self) -> float:
        """When the longest unused block was left; infinite without one."""
        return next(iter(self._idle.values()), float("inf"))

    def use(self, hashes: Sequence[int], most: int) -> list[Block]:
        """The longest beginning of a prompt that is there, at most `most` blocks; they stay until
        `leave`."""
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
        """The whole prompt is computed: the rest of its blocks are used through `chain` as well.
        Returns how many of them others had brought meanwhile."""
        twice = 0
        before = chain[-1].number if chain else 0
        for found in hashes[len(chain) :]:
            key = (before, found)
            block = self._known.get(key)
            if block is None:
                self._made += 1
                block = self._known[key] = Block(key, self._made)
            else:
                twice += 1
            self._hold(block)
            chain.append(block)
            before = block.number
        return twice

    def leave(self, chain: list[Block], now_s: float) -> None:
        """The user of `chain` is gone."""
        for block in reversed(chain):
            block.users -= 1
            if block.users == 0:
                self._idle[block] = now_s
        chain.clear()

    def drop(self) -> None:
        """Drop the longest unused block. REQUIRES: there is one."""
        block = next(iter(self._idle))
        del self._idle[block], self._known[block.key]

    def _hold(self, block: Block) -> None:
        if block.users == 0:
            self._idle.pop(block, None)
        block.users += 1
