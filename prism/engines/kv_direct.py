"""KV of a request on its way to another engine of the machine, from device to device.

The source engine offers the blocks and the target fetches them: one copy, page to page
(`kvcached.KVCache.offer_kv`). Devices that cannot read each other use a file (`kv_file`). With
several ranks each rank offers its part, and fetches that of its rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

import kvcached
from kvcached.errors import KvcachedError
from prism.config.schema import ClusterConfig
from prism.engines.ranks.group import RankGroup
from prism.messages.requests import Request, Resume

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]

log = logging.getLogger("prism.engine")


class DirectMoves:
    """One rank's end of it, for the model that it serves. Thread rule: the engine's thread.

    The source keeps the blocks for `kv_offer_s`, and its deactivation waits as long. The target has
    to admit the request in that time and to fetch it in `kv_fetch_s`, or it is computed again.
    """

    def __init__(self, kv: kvcached.KVCache, ranks: RankGroup, times: ClusterConfig) -> None:
        self._kv = kv
        self._ranks = ranks
        self._offer_s = times.kv_offer_s
        self._fetch_s = times.kv_fetch_s
        self._silent: set[str] = set()

    def reaches(self, targets: Sequence[str]) -> bool:
        """Whether the engine whose ranks lie on `targets` can fetch this rank's blocks."""
        rank = self._ranks.rank
        return len(targets) > rank and self._kv.can_offer_to(targets[rank])

    def offer(self, blocks: Ids) -> tuple[str, ...]:
        """The address of these blocks, for `Resume.kv_offers`; none if they cannot be offered."""
        try:
            return (self._kv.offer_kv(blocks, deadline_s=self._offer_s).address,)
        except KvcachedError as error:
            log.warning("KV of a request is not kept for its next engine: %s", error)
            return ()

    def fetch(self, resume: Resume, blocks: Ids, skip: int = 0) -> bool:
        """Fill `blocks` with those that came, but for the first `skip`. False, logged: their
        content is undefined, on all ranks. A collective of the ranks."""
        came = len(resume.kv_offers) == self._ranks.size
        ok = came and self._fetch(resume.kv_offers[self._ranks.rank], blocks, skip)
        return self._ranks.all_true(ok) if self._ranks.size > 1 else ok

    def _fetch(self, address: str, blocks: Ids, skip: int) -> bool:
        """Waits for a suspended source once, not for each of its requests."""
        source = address.rpartition("/")[0]
        if source in self._silent:
            return False
        started_s = time.monotonic()
        try:
            self._kv.fetch_kv(address, blocks, skip=skip, timeout_s=self._fetch_s)
        except KvcachedError as error:
            log.warning("KV of a request is computed again: %s", error)
            if time.monotonic() - started_s >= self._fetch_s:
                self._silent.add(source)
            return False
        return True


def of_all_ranks(parts: Sequence[Request]) -> Request:
    """One request as each rank exported it: with its KV if every rank has offered its part."""
    resume = parts[0].resume
    if resume is None:
        return parts[0]
    offers = tuple(o for part in parts if part.resume for o in part.resume.kv_offers)
    kv_tokens = resume.kv_tokens if len(offers) == len(parts) else 0
    joined = Resume(resume.output_ids, "", kv_tokens, offers if kv_tokens else ())
    return msgspec.structs.replace(parts[0], resume=joined)
