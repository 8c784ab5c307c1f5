"""KV memory of one engine: blocks in quanta on the ledgers of all its ranks.

A tensor-parallel engine holds the same blocks on each of its devices, and takes a quantum on all of
them or on none. Blocks are packed as tightly as possible (the live allocator fills the fullest page
first), so `quanta` is the smallest number that holds the live blocks.

Runs of decode steps take their KV step by step; `MemorySite.sync` updates the ledgers. The memory
that a run may still take is its claim. A run that starts on another engine does not count on
claimed memory. An engine that cannot proceed without that memory ends the run with its present
step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from prism_sim.core.prefix import HASH_TOKENS, SimPrefixCache
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import KvNeed
from prism_sim.engine.batch import Batch
from prism_sim.engine.memory import Account, Ledger


class KvRunner(Protocol):
    """Runs of decode steps that use a KV space."""

    def sync(self) -> None:
        """Updates the ledgers to the steps begun by now."""
        ...

    def catch_up(self) -> None:
        """Updates the KV space to the steps begun by now, block by block."""
        ...

    def end_run(self) -> None:
        """Ends the run in flight with its present step and releases its claim."""
        ...


class MemorySite:
    """Ledger of a device and the KV spaces on it."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.name = name
        self.ledger = ledger
        self.spaces: list[KvSpace] = []
        # True if a space has a prefix cache.
        self.reuses = False
        # Spaces of the engines with rank 0 on this device that hold requests without memory.
        self.starved: set[KvSpace] = set()

    def sync(self) -> None:
        """Updates the quanta of all engines to now."""
        for space in self.spaces:
            space.runner.sync()

    def end_runs(self) -> None:
        """Ends every run that may still grow with its present step."""
        for space in self.spaces:
            if space.target_quanta > space.quanta:
                space.runner.end_run()


class KvSpace:
    """KV blocks of one engine on the ledgers of its devices.

    Args:
        sites: Devices of the engine, rank 0 first.
        accounts: Its account on each of these.
        need: KV of a request.
        quantum_blocks: KV blocks in a quantum.
        quantum_bytes: Size of a quantum on one device.
    """

    def __init__(
        self,
        sites: Sequence[MemorySite],
        accounts: Sequence[Account],
        need: KvNeed,
        quantum_blocks: int,
        quantum_bytes: int,
    ) -> None:
        self.sites = sites
        self.accounts = accounts
        self.need = need
        self.block_tokens = need.block_tokens
        self.quantum_blocks = quantum_blocks
        self.quantum_bytes = quantum_bytes
        self.quantum_tokens = quantum_blocks * need.block_tokens
        # Maximum number of blocks that a request takes in one step.
        self.step_blocks = need.step_blocks
        # Blocks of requests and of cached prefixes.
        self.live_blocks = 0
        self.quanta = 0
        # Maximum of `quanta` since `reset_peak`.
        self._peak_quanta = 0
        # Quanta at the end of the run in flight; 0 without a claim.
        self.target_quanta = 0
        self._target_blocks = 0
        self.cache: SimPrefixCache | None = None
        # Set by the engine.
        self.runner: KvRunner
        self._ranks = [(s.ledger, a) for s, a in zip(sites, accounts, strict=True)]

    @property
    def kv_bytes(self) -> int:
        """KV memory on one device."""
        return self.quanta * self.quantum_bytes

    @property
    def peak_bytes(self) -> int:
        """Maximum of `kv_bytes` since `reset_peak`."""
        return self._peak_quanta * self.quantum_bytes

    def reset_peak(self) -> None:
        self._peak_quanta = self.quanta

    def blocks(self, tokens: int) -> int:
        return self.need.blocks(tokens)

    def bytes_of(self, blocks: int) -> int:
        """Returns the size of the quanta that hold `blocks`, on one device."""
        return -(-blocks // self.quantum_blocks) * self.quantum_bytes

    def holds(self, blocks: int) -> bool:
        """Returns whether `blocks` more fit in the held quanta."""
        return self.live_blocks + blocks <= self.quanta * self.quantum_blocks

    def fits(self, blocks: int) -> bool:
        """Returns whether `blocks` more can be taken now. Drops cached prefixes if needed."""
        need_bytes = self._growth_bytes(blocks)
        if need_bytes == 0 or need_bytes <= self._unclaimed_bytes():
            return True
        for site in self.sites:
            site.sync()
        return self.has_room(blocks) or (self.cache is not None and make_room(self, blocks))

    def has_room(self, blocks: int) -> bool:
        """Returns whether `blocks` more fit by the present state of the ledgers."""
        need_bytes = self._growth_bytes(blocks)
        return all(need_bytes <= ledger.room_bytes(account) for ledger, account in self._ranks)

    def has_room_on(self, site: MemorySite, blocks: int) -> bool:
        ledger, account = self._ranks[self.sites.index(site)]
        return self._growth_bytes(blocks) <= ledger.room_bytes(account)

    def left_bytes(self) -> float:
        """Returns the memory below the limit that neither the minimum nor the run in flight may
        take."""
        account = self.accounts[0]
        if account.limit_bytes is None:
            return math.inf
        quanta = max(self.quanta, self.target_quanta)
        return account.limit_bytes - max(account.min_bytes, quanta * self.quantum_bytes)

    def take(self, blocks: int) -> bool:
        """Takes all of `blocks`, or takes none and returns False."""
        if not self.fits(blocks):
            return False
        self.take_claimed(blocks)
        for site in self.sites:
            if site.ledger.claimed_bytes > site.ledger.free_bytes:
                site.end_runs()
        return True

    def take_claimed(self, blocks: int) -> None:
        """Takes `blocks`. REQUIRES: they fit, by a claim or by `fits`."""
        self.live_blocks += blocks
        self._resize()

    def free(self, blocks: int) -> None:
        self.live_blocks -= blocks
        self._resize()

    def hold(self, request: SimRequest, now_s: float, spare_blocks: int = 0) -> bool:
        """Takes KV for the tokens of the request that are not cached. Returns False, and takes
        none, unless they fit together with `spare_blocks`."""
        cache, need = self.cache, self.blocks(request.kv_tokens)
        if cache is None:
            return (not spare_blocks or self.fits(need + spare_blocks)) and self.take(need)
        if request.hashes:
            # The last token is always computed.
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
        """Adds the prompt's blocks to the cache, and frees those that another request has added in
        the meantime."""
        if self.cache is None:
            return
        duplicates = self.cache.extend(request.prefix, request.hashes)
        if duplicates:
            self.free(duplicates * self.cache.kv_blocks)

    def release(self, request: SimRequest, now_s: float) -> None:
        """Frees the request's own blocks; the cache keeps the others."""
        blocks, cache = self.blocks(request.kv_tokens), self.cache
        if cache is not None:
            blocks -= len(request.prefix) * cache.kv_blocks
            cache.leave(request.prefix, now_s)
        self.free(blocks)

    @property
    def idle_blocks(self) -> int:
        """Number of KV blocks of unused cached prefixes."""
        return 0 if self.cache is None else self.cache.idle_blocks

    @property
    def used_bytes(self) -> int:
        """KV memory of requests on one device."""
        return self.bytes_of(self.live_blocks - self.idle_blocks)

    @property
    def idle_since_s(self) -> float:
        return math.inf if self.cache is None else self.cache.oldest_s

    def drop_idle(self) -> None:
        """Drops the oldest cached block. REQUIRES: one is unused, and the runner has caught up."""
        assert self.cache is not None
        self.cache.drop()
        self.live_blocks -= self.cache.kv_blocks
        if self.target_quanta:
            self._set_target(self._target_blocks - self.cache.kv_blocks)
        self._resize()

    def steps_that_fit(self, batch: Batch, steps: int) -> tuple[int, int]:
        """Returns the largest part of `steps` decode steps that fits next to the claims of other
        runs, at least 1, and the blocks that it takes. REQUIRES: one step `fits`."""
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
        """Claims `blocks` for the run that starts now."""
        self._set_target(self.live_blocks + blocks)

    def _set_target(self, target_blocks: int) -> None:
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
        self._peak_quanta = max(self._peak_quanta, quanta)
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


# --- dropping cached prefixes ------------------------------------------------------------------
# An engine first drops its own prefixes, oldest first, as in the live system. Then the other
# engines drop theirs down to their minimum.


def idle_bytes(site: MemorySite, but: KvSpace | None = None) -> int:
    """Returns the memory that dropping all unused prefixes would free on the device."""
    if not site.reuses:
        return 0
    return sum(returnable_bytes(space, site) for space in site.spaces if space is not but)


def make_room(space: KvSpace, blocks: int) -> bool:
    """Drops as few prefixes as needed for `blocks` to fit. Drops none and returns False if all of
    them are not enough."""
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


def drop_until_free(site: MemorySite, need_bytes: int) -> None:
    """Drops prefixes until `need_bytes` are free on the device. REQUIRES: dropping all of them
    frees that much."""
    while site.ledger.free_bytes < need_bytes:
        _drop_oldest(site)


def _drop_oldest(site: MemorySite) -> None:
    droppable = [space for space in site.spaces if returnable_bytes(space, site)]
    min(droppable, key=lambda space: space.idle_since_s).drop_idle()


def returnable_bytes(space: KvSpace, site: MemorySite) -> int:
    """Returns the memory that dropping one engine's unused prefixes would free on the device."""
    if not space.idle_blocks:
        return 0
    space.runner.catch_up()
    floor_bytes = space.accounts[space.sites.index(site)].min_bytes
    left = -(-(space.live_blocks - space.idle_blocks) // space.quantum_blocks)
    left_bytes = max(floor_bytes, left * space.quantum_bytes)
    return max(floor_bytes, space.kv_bytes) - left_bytes
