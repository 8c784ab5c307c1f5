"""SGLang's paged allocator over kvcached blocks (SGLang's page = kvcached's block).

Blocks are taken from kvcached and held, in SGLang's own `free_pages` tensor, before SGLang slices
them off its head. SGLang first asks whether there is room and allocates later, while other engines
of the device compete for the same pages, so only held blocks are safe. Blocks that a step does not
use are returned at its end.

The books are kept on the CPU, in addition to the tensor that SGLang's kernels read: reading ids
back from a GPU would wait for all of its running work. Only blocks that SGLang frees are read back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.utils import get_num_new_pages

from kvcached.engines.sglang.budget import BlockReserver
from kvcached.engines.sglang.kv_pool import KvcachedLatentPool, KvcachedPool
from kvcached.engines.sglang.memory import Ids, active_memory

Evict = Callable[[Any, int | None], int]

_NO_BLOCKS: Ids = np.empty(0, dtype=np.int64)


class KvcachedAllocator(BlockReserver, PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """SGLang's paged allocator over kvcached blocks.

    `available_size` stays virtual, since SGLang checks it against its totals when idle. The memory
    available now is `attainable_tokens`.
    """

    free_pages: torch.Tensor
    num_pages: int
    page_size: int

    def __init__(  # noqa: PLR0917 (SGLang's signature)
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: Any,
        need_sort: bool,
    ) -> None:
        pool = getattr(kvcache, "full_kv_pool", kvcache)  # of a model with states
        if not isinstance(pool, KvcachedPool | KvcachedLatentPool) or pool.kv is None:
            raise NotImplementedError(
                f"its KV layout ({type(pool).__name__}) is not supported by this version: serve "
                "a model with MHA, GQA, MQA or MLA"
            )
        self.kv = pool.kv
        self.tree_cache: Any = None  # that of the last reservation
        self._states = getattr(getattr(kvcache, "mamba_pool", None), "slots", None)
        self._memory = active_memory()
        self._rank_kv = self._memory.rank_kv(pool.kv)
        self._live = torch.zeros(0, dtype=torch.bool)
        self._held = _NO_BLOCKS  # the ids in `free_pages`
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)

    # --- available memory ------------------------------------------------------------------

    def available_size(self) -> int:
        return (self.num_pages - self._live_pages) * self.page_size

    def attainable_tokens(self) -> int:
        """Returns the tokens that fit now without evicting: held, mapped, and the ledger's room."""
        held = len(self.free_pages)
        room = min(self.kv.available_blocks(), self.num_pages - self._live_pages - held)
        return (held + room) * self.page_size

    def reserve_blocks(self, pages: int, tree_cache: Any, evict: Evict | None = None) -> bool:
        """Holds `pages` blocks, evicting own prefix cache when the device is full. `evict` replaces
        `evict_cache`."""
        self.tree_cache = tree_cache
        evict = evict or self.evict_cache
        while not self._hold(pages):
            short = pages * self.page_size - self.agreed_tokens()
            if tree_cache is None or not evict(tree_cache, max(short, self.page_size)):
                return self._hold(pages, partial(self._memory.find_room, self.kv))
        return True

    def window_tokens(self, num_tokens: int, tree_cache: Any) -> int:
        """Returns 0: all layers keep all tokens."""
        return 0

    def reserve_states(self, requests: int) -> bool:
        """Holds states for `requests` new requests, if the model has any."""
        return self._states is None or self._states.hold(requests)

    def return_held_blocks(self) -> None:
        """Frees the blocks that the last step did not use."""
        if len(self._held):
            self.kv.free_kv(self._held)
            self._held, self.free_pages = _NO_BLOCKS, self._no_pages()
        if self._states is not None:
            self._states.return_held()

    def _hold(self, pages: int, find: Callable[[int], Ids | None] | None = None) -> bool:
        """Takes the missing ones of `pages` blocks from kvcached. Returns False if they do not fit.

        kvcached lays out whole slabs, which may have more blocks than SGLang counts. Any of them
        may be used, but never more at a time than SGLang's number.
        """
        missing = pages - len(self.free_pages)
        if missing <= 0:
            return True
        ids = None
        if self._live_pages + pages <= self.num_pages:
            ids = (find or self._rank_kv.alloc_kv)(missing)
        if ids is None:
            return False
        self._held = np.concatenate((self._held, ids))
        self.free_pages = torch.cat((self.free_pages, self._on_device(ids)))
        return True

    def _on_device(self, ids: Ids) -> torch.Tensor:
        """Copies ids to the device without waiting for its running work."""
        if torch.device(self.device).type != "cuda":
            return torch.from_numpy(ids).to(self.device)
        return torch.from_numpy(ids).pin_memory().to(self.device, non_blocking=True)

    def evict_cache(self, tree_cache: Any, tokens: int | None) -> int:
        """Evicts about `tokens` (None: all) of unused prefix cache, least recently used first."""
        if tokens is None:
            tokens = int(tree_cache.evictable_size())
        result = tree_cache.evict_for_alloc(EvictParams(num_tokens=tokens))
        return int(result.num_tokens_evicted)

    # --- allocation: stock code, once enough blocks are held -------------------------------

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if not self.reserve_blocks(need_size // self.page_size, self.tree_cache):
            return None
        return self._counted(super().alloc(need_size))

    def alloc_extend(  # noqa: PLR0917 (SGLang's signature)
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        pages = get_num_new_pages(
            seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
        )
        if not self.reserve_blocks(pages, self.tree_cache):
            return None
        slots = super().alloc_extend(
            prefix_lens,
            prefix_lens_cpu,
            seq_lens,
            seq_lens_cpu,
            last_loc,
            extend_num_tokens,
            num_new_pages=pages,
        )
        return self._counted(slots)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
        if not self.reserve_blocks(pages, self.tree_cache):
            return None
        return self._counted(super().alloc_decode(seq_lens, seq_lens_cpu, last_loc))

    def _counted(self, slots: torch.Tensor | None) -> torch.Tensor | None:
        """Marks the blocks that were sliced off the held ones as live."""
        count = len(self._held) - len(self.free_pages)
        used, self._held = self._held[:count], self._held[count:]
        self._live[torch.from_numpy(used)] = True
        self._live_pages += count
        return slots

    # --- the single points of release ------------------------------------------------------

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        pages = torch.cat(page_ids).to(torch.int64).cpu()
        self.kv.free_kv(pages.numpy())
        self._live[pages] = False
        self._live_pages -= len(pages)

    def clear(self) -> None:
        held = torch.nonzero(self._live).flatten()
        if len(held):
            self.kv.free_kv(held.numpy())
        self.return_held_blocks()
        self.free_pages = self._no_pages()
        self.free_group = None
        self.free_page_ids_group: list[torch.Tensor] = []
        self.staged_pages: list[torch.Tensor] = []
        self.num_staged_pages = 0
        self._live = torch.zeros(self.kv.num_blocks, dtype=torch.bool)
        self._live_pages = 0

    def get_all_free_pages(self) -> None:
        """Returns None, for which SGLang skips its census: kvcached owns the free pages."""

    def _no_pages(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64, device=self.device)
