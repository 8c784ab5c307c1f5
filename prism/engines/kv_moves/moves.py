"""Transfer of running requests' KV from one engine to another.

KV moves in one of two ways, and the source engine chooses:

1. From device to device. The source offers the blocks, and the target fetches them with one copy,
   page to page (`kvcached.KVCache.offer_kv`). Each rank of a tensor-parallel engine offers its
   part and fetches that of the same rank.
2. Through a file (`kv_file`), if the devices cannot read each other and the engine has one rank.
   If the target is on another machine, agents copy the file there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcached import KVCache
from kvcached.errors import KvcachedError
from prism.config.schema.cluster_config import ClusterConfig
from prism.engines.kv_moves import kv_file
from prism.engines.ranks.group import RankGroup
from prism.messages.requests import Resume

Ids = NDArray[np.int64]
Blocks = Sequence[int] | Ids

# Function (view, slots) of an adapter that returns the rows of these tokens, in any numpy dtype.
# The view is `KVCache.buffer` of a layer's K or V, (tokens, heads, head_dim).
Read = Callable[[Any, Ids], NDArray[Any]]
# Function (view, slots, rows) of an adapter that writes these tokens, given as (tokens, bytes).
Write = Callable[[Any, Ids, kv_file.Rows], None]
# Function (blocks, start) that fills a request's blocks with its KV of the tokens from `start`, a
# multiple of a block. Returns False, on all ranks, if the KV cannot be fetched; the content of the
# blocks is undefined then. With offers, a collective of the ranks.
Fill = Callable[[Blocks, int], bool]

log = logging.getLogger("prism.engine")


class KVMoves:
    """Exports and imports of one rank for its active model. Thread rule: the engine's thread.

    The source keeps offered blocks for `kv_offer_s`, and its deactivation waits that long. The
    target must admit the request in that time and fetch its KV within `kv_fetch_s`; otherwise the
    KV is computed again.
    """

    def __init__(
        self, kv: KVCache, ranks: RankGroup, config: ClusterConfig, read: Read, write: Write
    ) -> None:
        self._kv = kv
        self._ranks = ranks
        self._config = config
        self._read, self._write = read, write
        self._block_tokens = kv.layout.block_tokens
        # K of all layers, then V. Both engines of a move must use this order.
        self._parts = sorted(kv.layout.parts, key=lambda part: part.name)
        self._unresponsive: set[str] = set()  # sources that a fetch has timed out on

    def export(
        self, output_ids: list[int], tokens: int, blocks: Blocks, targets: Sequence[str] | None
    ) -> Resume:
        """Returns the progress of a request, with the location of its KV if that can move.

        Args:
            output_ids: output so far.
            tokens: number of tokens with KV.
            blocks: blocks of the request, in order.
            targets: devices of the ranks of the next engine. None: KV is lost.
        """
        if not tokens or targets is None or (targets and len(targets) != self._ranks.size):
            return Resume(output_ids)  # other numbers of ranks divide KV in other ways
        rank = self._ranks.rank
        if len(targets) > rank and self._kv.can_offer_to(targets[rank]):
            offers = self._offer(blocks[: -(-tokens // self._block_tokens)])
            return Resume(output_ids, "", tokens if offers else 0, offers)
        if self._ranks.size > 1:
            return Resume(output_ids)
        slots = self._slots(blocks, 0, tokens)
        rows = (self._read(view, slots) for view in self._views())
        path = kv_file.save(self._config.moves_dir, rows, len(self._parts))
        return Resume(output_ids, path, tokens if path else 0)

    def importer(self, resume: Resume) -> Fill | None:
        """Returns the function that fetches the KV that came with `resume`, None if there is none.

        A file is mapped and removed now. It has the KV of an engine with one rank.
        """
        if not resume.kv_path:
            return partial(self._fetch_ranks, resume) if resume.kv_offers else None
        if self._ranks.size > 1:
            return None
        count = len(self._parts)
        token_bytes = self._kv.layout.token_bytes // count
        rows = kv_file.take(resume.kv_path, count, resume.kv_tokens, token_bytes)
        return None if rows is None else partial(self._fill, rows)

    def _fill(self, rows: kv_file.Rows, blocks: Blocks, start: int) -> bool:
        end = min(rows.shape[1], len(blocks) * self._block_tokens)
        slots = self._slots(blocks, start, end)
        for view, row in zip(self._views(), rows, strict=True):
            self._write(view, slots, row[start:end])
        return True

    def _views(self) -> list[Any]:
        return [self._kv.buffer(part.layer, part.name) for part in self._parts]

    def _slots(self, blocks: Blocks, start: int, end: int) -> Ids:
        block, offset = np.divmod(np.arange(start, end), self._block_tokens)
        slots: Ids = np.asarray(blocks, np.int64)[block] * self._block_tokens + offset
        return slots

    def _offer(self, blocks: Blocks) -> tuple[str, ...]:
        """Returns the address of these blocks for `Resume.kv_offers`, empty if they cannot be
        offered."""
        try:
            ids = np.asarray(blocks, np.int64)
            return (self._kv.offer_kv(ids, deadline_s=self._config.kv_offer_s).address,)
        except KvcachedError as error:
            log.warning("the KV of a request cannot be offered to its next engine: %s", error)
            return ()

    def _fetch_ranks(self, resume: Resume, blocks: Blocks, start: int) -> bool:
        skip, end = start // self._block_tokens, -(-resume.kv_tokens // self._block_tokens)
        ranks, offers = self._ranks, resume.kv_offers
        ids = np.asarray(blocks[skip:end], np.int64)
        ok = len(offers) == ranks.size and self._fetch(offers[ranks.rank], ids, skip)
        return ranks.all_true(ok)

    def _fetch(self, address: str, ids: Ids, skip: int) -> bool:
        """Returns whether the fetch succeeded. A source that has timed out once is not asked again
        for its other requests."""
        source = address.rpartition("/")[0]
        if source in self._unresponsive:
            return False
        started_s = time.monotonic()
        try:
            self._kv.fetch_kv(address, ids, skip=skip, timeout_s=self._config.kv_fetch_s)
        except KvcachedError as error:
            log.warning("KV of a request is computed again: %s", error)
            if time.monotonic() - started_s >= self._config.kv_fetch_s:
                self._unresponsive.add(source)
            return False
        return True
