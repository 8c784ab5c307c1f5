"""KV memory of one engine: blocks in quanta on the ledgers of all its ranks.

A tensor-parallel engine holds the same blocks on each of its devices and takes a quantum on all of
them or on none. Blocks are packed as tightly as they could be (the live allocator fills the
fullest page first), so `quanta` is the fewest that hold the live blocks.

Runs of decode steps take their KV step by step, which others see in the ledgers as it happens
(`MemorySite.sync`). What a run may still take is its claim. No other run counts on claimed memory
at its start; an engine that really needs the memory ends the run with its present step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prism_sim.core.prefix import HASH_TOKENS, SimPrefixCache
from prism_sim.core.request import SimRequest
from prism_sim.engine.batch import Batch
from prism_sim.engine.memory import Account, Ledger

if TYPE_CHECKING:
    from prism_sim.engine.engine import SimEngine


class MemorySite:
    """A device's ledger and the KV spaces on it. reuses: some of them have a prefix cache. starved:
    engines with their rank 0 here that hold requests without memory."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.name = name
        self.ledger = ledger
        self.spaces: list[KvSpace] = []
        self.reuses = False
        self.starved: set[SimEngine] = set()

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
        self.cache: SimPrefixCache | None = None
        self.runner: SimEngine
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

    def hold(self, request: SimRequest, now_s: float, spare_blocks: int = 0) -> bool:
        """KV for all of the request that is not cached, if `spare_blocks` fit as well."""
        cache, need = self.cache, self.blocks(request.kv_tokens)
        if cache is None:
            return (not spare_blocks or self.fits(need + spare_blocks)) and self.take(need)
        if request.hashes:
            # at least its last token is computed
            request.prefix = cache.use(request.hashes, (request.kv_tokens - 1) // HASH_TOKENS)
            need -= len(request.prefix) * cache.kv_blocks
        if (spare_blocks and not self.fits(need + spare_blocks)) or not self.take(need):
            cache.leave(request.prefix, now_s)
            return False
        cached_tokens = len(request.prefix) * HASH_TOKENS
        request.todo_tokens = request.kv_tokens - cached_tokens
        if not request.retractions:
            request.cached_tokens = cached_tokens
        return True

    def keep_prompt(self, request: SimRequest) -> None:
        """The cache takes the prompt's blocks. A block that others computed at the same time is
        freed."""
        if self.cache is not None and (twice := self.cache.extend(request.prefix, request.hashes)):
            self.give(twice * self.cache.kv_blocks)

    def release(self, request: SimRequest, now_s: float) -> None:
        """Free the request's own blocks; the cache keeps the rest."""
        blocks, cache = self.blocks(request.kv_tokens), self.cache
        if cache is not None:
            blocks -= len(request.prefix) * cache.kv_blocks
            cache.leave(request.prefix, now_s)
        self.give(blocks)

    @property
    def idle_blocks(self) -> int:
        """Of unused cached prefixes."""
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
        steps = batch.steps_within(most, steps)
        return steps, batch.new_blocks(steps)

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
            for ledger, account in self._ranks:
                if account.claim_bytes:
                    ledger.set_claim(account, 0)

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


# --- cached prefixes give way ------------------------------------------------------------------
# An engine gives up its own prefixes first, the oldest first, as in the live system. Then the
# others give what lies above their own minimum.


def idle_bytes(site: MemorySite, but: KvSpace | None = None) -> int:
    """The memory that all unused prefixes would give back to the device's ledger."""
    if not site.reuses:
        return 0
    return sum(returnable_bytes(space, site) for space in site.spaces if space is not but)


def make_room(space: KvSpace, blocks: int) -> bool:
    """Drop no more than it takes for `blocks` to fit; nothing where all would not be enough."""
    space.runner.catch_up()
    least_blocks = space.live_blocks - space.idle_blocks + blocks
    least_bytes = space.bytes_of(least_blocks)
    for site, account in zip(space.sites, space.accounts, strict=True):
        most_bytes = max(account.min_bytes, account.kv_bytes) + site.ledger.free_bytes
        most_bytes += idle_bytes(site, space)
        if account.limit_bytes is not None:
            most_bytes = min(most_bytes, account.limit_bytes)
        if least_bytes > most_bytes:
            return False
    while space.idle_blocks and not space.has_room(blocks):
        space.drop_idle()
    for site in space.sites:
        while not space.has_room_on(site, blocks):
            _drop_oldest(site)
    return True


def clear(site: MemorySite, need_bytes: int) -> None:
    """Drop until `need_bytes` are free on the device. REQUIRES: they would be, with all dropped."""
    while site.ledger.free_bytes < need_bytes:
        _drop_oldest(site)


def _drop_oldest(site: MemorySite) -> None:
    giving = [space for space in site.spaces if returnable_bytes(space, site)]
    min(giving, key=lambda space: space.idle_since_s).drop_idle()


def returnable_bytes(space: KvSpace, site: MemorySite) -> int:
    """What the device's ledger would get back of one engine's."""
    if not space.idle_blocks:
        return 0
    space.runner.catch_up()
    floor_bytes = space.accounts[space.sites.index(site)].min_bytes
    left = -(-(space.live_blocks - space.idle_blocks) // space.quantum_blocks)
    left_bytes = max(floor_bytes, left * space.quantum_bytes)
    return max(floor_bytes, space.kv_bytes) - left_bytes
