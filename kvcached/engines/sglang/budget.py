"""Admission of prefills by the room in kvcached instead of SGLang's virtual pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from kvcached.engines.sglang.memory import PoolMemory


class BlockReserver(ABC):
    """Base of allocators that hold blocks before SGLang relies on them, with SGLang's hooks for its
    capacity. It comes before SGLang's class among the bases, whose methods it replaces."""

    page_size: int
    _memory: PoolMemory

    @abstractmethod
    def attainable_tokens(self) -> int:
        """Returns the tokens that fit now without evicting."""

    @abstractmethod
    def reserve_blocks(self, pages: int, tree_cache: Any) -> bool:
        """Holds `pages` blocks, evicting own prefix cache when the device is full. Returns False if
        they do not fit."""

    @abstractmethod
    def window_tokens(self, num_tokens: int, tree_cache: Any) -> int:
        """Returns the tokens by which a request of `num_tokens` takes more memory than its layers
        without a window."""

    @abstractmethod
    def reserve_states(self, requests: int) -> bool:
        """Holds states for `requests` new requests, if the model has any. Returns False if they do
        not fit."""

    def agreed_tokens(self) -> int:
        """Returns the smallest `attainable_tokens` of all ranks: a collective."""
        return self._memory.least(self.attainable_tokens())

    def report_shortage(self, tokens: int) -> None:
        """Reports that a request waits for memory of `tokens` more tokens."""
        self._memory.report_shortage(tokens)

    def create_prefill_budget(
        self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0
    ) -> KvcachedBudget:
        return KvcachedBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def evict_to_free_tokens(  # noqa: B027 (replaces SGLang's)
        self, tree_cache: Any, num_tokens: int
    ) -> None:
        """Does nothing: the budget and `check_decode_capacity` reserve capacity exactly."""

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache: Any, requests: Any = None, spec_algorithm: Any = None
    ) -> bool:
        return self.reserve_blocks(-(-num_tokens // self.page_size), tree_cache)


class KvcachedBudget(PrefillBudget):  # type: ignore[misc]
    """Budget of one prefill pass. It admits a request only once the allocator holds its blocks."""

    allocator: BlockReserver

    def __init__(self, allocator: Any, tree_cache: Any, *, num_mixed_decode_tokens: int = 0):
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        self._granted_pages = 0
        self._granted_requests = 0

    def _available_and_evictable(self) -> int:
        return self.allocator.agreed_tokens() + int(self.tree_cache.evictable_size())

    def check_prefill(
        self,
        *,
        extend_input_len: int,
        total_tokens: int,
        max_new_tokens: int,
        input_tokens: int,
        swa_host_hit_length: int,
        chunk_limit: int | None,
        auxiliary_swa_host_hit_length: int = 0,
    ) -> tuple[bool, int | None]:
        # Without the extra block per request that SGLang adds. Prefixes and chunks end on a block's
        # edge here, and the extra block would exceed the room guaranteed for a full context.
        needed = self.ceil_paged_tokens(total_tokens - self.page_size)
        needed += self.allocator.window_tokens(needed, self.tree_cache)
        if needed > self.remaining_total:
            self.allocator.report_shortage(needed - int(self.remaining_total))
            return False, None
        now = extend_input_len if chunk_limit is None else min(extend_input_len, chunk_limit)
        has_state = self.allocator.reserve_states(self._granted_requests + 1)
        return (True, chunk_limit) if has_state and self._reserve_blocks(now) else (False, None)

    def available_chunk_tokens(self, chunk_limit: int) -> int:
        return chunk_limit

    def fit_chunk(
        self, *, extend_input_len: int, max_new_tokens: int, chunk_limit: int
    ) -> int | None:
        """Returns None to park the chunked request until running requests free blocks."""
        return chunk_limit if self._reserve_blocks(min(extend_input_len, chunk_limit)) else None

    def reserve(self, extend_input_len: int, max_new_tokens: int, **kwargs: Any) -> None:
        super().reserve(extend_input_len, max_new_tokens, **kwargs)
        tokens = extend_input_len + max_new_tokens
        self.total_offset += self.allocator.window_tokens(tokens, self.tree_cache)
        self._granted_pages += self._pages(extend_input_len)
        self._granted_requests += 1

    def _reserve_blocks(self, tokens: int) -> bool:
        return self.allocator.reserve_blocks(
            self._granted_pages + self._pages(tokens), self.tree_cache
        )

    def _pages(self, tokens: int) -> int:
        return int(self.ceil_paged_tokens(tokens)) // int(self.page_size)
