"""KV memory of one engine: blocks in quanta on the ledgers of all its ranks.

A tensor-parallel engine holds the same blocks on each of its devices and takes a quantum on all of
them or on none. Blocks are packed as tightly as they could be (the live allocator fills the
fullest page first), so `quanta` is the fewest that hold the live blocks.

Runs of decode steps take their KV step by step, which others see in the ledgers as it happens
(`MemorySite.sync`). What a run may still take is its claim: nobody starts a run that counts on it,
and who really needs the memory ends the run with its present step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from prism.sim.batch import Batch
from prism.sim.memory import Account, Ledger
from prism.sim.prefix import PrefixCache
from prism.sim.reclaim import make_room


class Runner(Protocol):
    """The engine whose KV it is."""

    def sync(self) -> None:
        """Take the quanta of all steps that have begun."""

    def catch_up(self) -> None:
        """Take the blocks of all steps that have begun."""

    def end_run(self) -> None:
        """End the run in flight with its present step and drop its claim."""


class MemorySite:
    """A device's ledger and the KV spaces on it. reuses: some of them have a prefix cache. starved:
    engines with their rank 0 here that hold requests without memory."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.name = name
        self.ledger = ledger
        self.spaces: list[KvSpace] = []
        self.reuses = False
        self.starved: set[Runner] = set()

    def sync(self) -> None:
        """Every engine's quanta as of now."""
        for space in self.spaces:
            space.runner.sync()

    def end_runs(self) -> None:
        """No run counts on memory beyond its present step."""
        for space in self.spaces:
            if space.target_quanta > space.quanta:
                space.runner.end_run()


class KvSpace:
    """quantum_bytes: of one quantum on one device; quantum_blocks: the KV blocks in it.
    target_quanta: what the run in flight will hold at its end, 0 without a claim. cache: prefixes
    that are among the live blocks."""

    def __init__(
        self,
        sites: Sequence[MemorySite],
        accounts: Sequence[Account],
        block_tokens: int,
        quantum_blocks: int,
        quantum_bytes: int,
    ) -> None:
        self.sites = sites
        self.accounts = accounts
        self.block_tokens = block_tokens
        self.quantum_blocks = quantum_blocks
        self.quantum_bytes = quantum_bytes
        self.quantum_tokens = quantum_blocks * block_tokens
        self.live_blocks = 0
        self.quanta = 0
        self.target_quanta = 0
        self._target_blocks = 0
        self.cache: PrefixCache | None = None
        self.runner: Runner
        self._ranks = [(s.ledger, a) for s, a in zip(sites, accounts, strict=True)]

    @property
    def kv_bytes(self) -> int:
        """On one device."""
        return self.quanta * self.quantum_bytes

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def bytes_of(self, blocks: int) -> int:
        """Of as many quanta as hold `blocks`, on one device."""
        return -(-blocks // self.quantum_blocks) * self.quantum_bytes

    def holds(self, blocks: int) -> bool:
        """Whether `blocks` more lie in the quanta that it has."""
        return self.live_blocks + blocks <= self.quanta * self.quantum_blocks

    def fits(self, blocks: int) -> bool:
        """Whether `blocks` more could be taken now; cached prefixes give way for them."""
        need_bytes = self._growth_bytes(blocks)
        if need_bytes == 0 or need_bytes <= self._unclaimed_bytes():
            return True
        for site in self.sites:
            site.sync()
        return self.has_room(blocks) or (self.cache is not None and make_room(self, blocks))

    def has_room(self, blocks: int) -> bool:
        """Whether `blocks` more fit as the ledgers stand."""
        need_bytes = self._growth_bytes(blocks)
        return all(need_bytes <= ledger.room_bytes(account) for ledger, account in self._ranks)

    def has_room_on(self, site: MemorySite, blocks: int) -> bool:
        ledger, account = self._ranks[self.sites.index(site)]
        return self._growth_bytes(blocks) <= ledger.room_bytes(account)

    def left_bytes(self) -> float:
        """Below its limit, beside all that its guarantee and the run in flight may take."""
        account = self.accounts[0]
        if account.limit_bytes is None:
            return math.inf
        quanta = max(self.quanta, self.target_quanta)
        return account.limit_bytes - max(account.min_bytes, quanta * self.quantum_bytes)

    def take(self, blocks: int) -> bool:
        """All of `blocks`, or False."""
        if not self.fits(blocks):
            return False
        self.take_claimed(blocks)
        for site in self.sites:
            if site.ledger.claimed_bytes > site.ledger.free_bytes:
                site.end_runs()
        return True

    def take_claimed(self, blocks: int) -> None:
        """REQUIRES: they fit, by a claim or by `fits`."""
        self.live_blocks += blocks
        self._resize()

    def give(self, blocks: int) -> None:
        self.live_blocks -= blocks
        self._resize()

    @property
    def idle_blocks(self) -> int:
        """Of cached prefixes that nobody uses."""
        return 0 if self.cache is None else self.cache.idle_blocks

    @property
    def used_bytes(self) -> int:
        """Of requests, on one device."""
        return self.bytes_of(self.live_blocks - self.idle_blocks)

    @property
    def idle_since_s(self) -> float:
        return math.inf if self.cache is None else self.cache.oldest_s

    def drop_idle(self) -> None:
        """The oldest cached block is gone. REQUIRES: one is idle, and the runner has caught up."""
        assert self.cache is not None
        self.cache.drop()
        self.live_blocks -= self.cache.kv_blocks
        if self.target_quanta:
            self._aim(self._target_blocks - self.cache.kv_blocks)
        self._resize()

    def steps_that_fit(self, batch: Batch, steps: int) -> tuple[int, int]:
        """The most of `steps` decode steps that no other run's claim stands against, at least 1,
        and the blocks that they take. REQUIRES: one step `fits`."""
        most, blocks = self._unclaimed_blocks(), batch.new_blocks(steps)
        if blocks <= most:
            return steps, blocks
        if batch.new_blocks(1) > most:
            for site in self.sites:
                site.end_runs()
            most = self._unclaimed_blocks()
        low, high = 1, steps
        while low < high:
            middle = (low + high + 1) // 2
            if batch.new_blocks(middle) <= most:
                low = middle
            else:
                high = middle - 1
        return low, batch.new_blocks(low)

    def claim(self, blocks: int) -> None:
        """The run that starts now will take `blocks`."""
        self._aim(self.live_blocks + blocks)

    def _aim(self, target_blocks: int) -> None:
        self._target_blocks = target_blocks
        self.target_quanta = -(-target_blocks // self.quantum_blocks)
        self._note_claims()

    def unclaim(self) -> None:
        if self.target_quanta:
            self.target_quanta = 0
            self._note_claims()

    def _resize(self) -> None:
        quanta = -(-self.live_blocks // self.quantum_blocks)
        if quanta == self.quanta:
            return
        self.quanta = quanta
        for ledger, account in self._ranks:
            ledger.set_kv(account, quanta * self.quantum_bytes)
        if self.target_quanta:
            self._note_claims()

    def _note_claims(self) -> None:
        target_bytes = self.target_quanta * self.quantum_bytes
        for ledger, account in self._ranks:
            held_bytes = max(account.min_bytes, account.kv_bytes)
            ledger.set_claim(account, max(0, target_bytes - held_bytes))

    def _growth_bytes(self, blocks: int) -> int:
        quanta = -(-(self.live_blocks + blocks) // self.quantum_blocks)
        return (quanta - self.quanta) * self.quantum_bytes

    def _unclaimed_bytes(self) -> int:
        ledger, account = self._ranks[0]
        if len(self._ranks) == 1:
            return ledger.unclaimed_bytes(account)
        return min(ledger.unclaimed_bytes(account) for ledger, account in self._ranks)

    def _unclaimed_blocks(self) -> int:
        quanta = self.quanta + max(0, self._unclaimed_bytes()) // self.quantum_bytes
        return quanta * self.quantum_blocks - self.live_blocks
