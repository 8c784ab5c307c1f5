"""Random steps of test_model with pages mapped ahead of need."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from .test_model import LAYOUT, PAGE, KvMachine

PER_SLAB = LAYOUT.slab_tokens(PAGE) // LAYOUT.block_tokens
SLAB_PAGES = LAYOUT.quantum_bytes(PAGE) // PAGE


class PremappedMachine(KvMachine):
    """KvMachine with watermarks. Between them only trim and a low limit unmap."""

    def __init__(self) -> None:
        self.high_slabs = 0
        super().__init__()

    def used_slabs(self) -> set[int]:
        return {block // PER_SLAB for block in self.live} | {0}

    def empty_slabs(self) -> int:
        return self.kv.mapped_bytes() // LAYOUT.quantum_bytes(PAGE) - len(self.used_slabs())

    @rule(low=st.integers(0, 4), extra=st.integers(0, 4))
    def premap(self, low: int, extra: int) -> None:
        self.high_slabs = low + extra
        self.kv.set_premapped_pages(low * SLAB_PAGES, self.high_slabs * SLAB_PAGES)
        before, available = self.empty_slabs(), self.kv.available_blocks()
        mapped = self.kv.refill()
        assert self.empty_slabs() == before + mapped // SLAB_PAGES
        assert self.empty_slabs() >= low or self.kv.refill() == 0
        assert self.kv.available_blocks() == available

    @rule()
    def trim(self) -> None:
        self.kv.trim()
        assert self.empty_slabs() == 0
        assert self.client.usage().committed_bytes == self.kv.mapped_bytes()

    @rule(quanta=st.one_of(st.none(), st.integers(0, 12)))
    def limit(self, quanta: int | None) -> None:
        limit_bytes = None if quanta is None else quanta * LAYOUT.quantum_bytes(PAGE)
        self.client.set_limit(limit_bytes)
        held_bytes = self.client.usage().committed_bytes
        used_bytes = len(self.used_slabs()) * LAYOUT.quantum_bytes(PAGE)
        assert limit_bytes is None or held_bytes <= max(limit_bytes, used_bytes)

    @invariant()
    def books_agree(self) -> None:
        self.kv.check_integrity()
        usage = self.device.usage()
        assert self.kv.live_blocks() == len(self.live)
        assert 0 <= self.empty_slabs() <= self.high_slabs
        assert self.client.usage().committed_bytes >= self.kv.mapped_bytes()
        slabs = self.kv.mapped_bytes() // LAYOUT.quantum_bytes(PAGE)
        assert self.kv.free_mapped_blocks() == slabs * PER_SLAB - len(self.live) - 1
        needed = -(-(len(self.live) + 1) // PER_SLAB)
        assert self.kv.fragmentation().needed_bytes == needed * LAYOUT.quantum_bytes(PAGE)
        assert self.device.resident_bytes() <= usage.committed_bytes


PremappedMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestPremappedKvCacheAgainstADict = PremappedMachine.TestCase
