"""Transfer of a request's KV to another engine of the machine, from device to device.

The source engine offers the blocks and the target fetches them with one copy, page to page
(`kvcached.KVCache.offer_kv`). Devices that cannot read each other use a file (`kv_file`). Each rank
of a tensor-parallel engine offers its part and fetches that of the same rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

import kvcached
from kvcached.errors import KvcachedError
from prism.config.schema.cluster_config import ClusterConfig
from prism.engines.ranks.group import RankGroup
from prism.messages.requests import Request, Resume

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]

log = logging.getLogger("prism.engine")


class DirectMoves:
    """Offers and fetches of one rank for its active model. Thread rule: the engine's thread.

    The source keeps the blocks for `kv_offer_s`, and its deactivation waits that long. The target
    must admit the request in that time and fetch its KV within `kv_fetch_s`; otherwise the KV is
    computed again.
    """

    def __init__(self, kv: kvcached.KVCache, ranks: RankGroup, times: ClusterConfig) -> None:
        self._kv = kv
        self._ranks = ranks
        self._offer_s = times.kv_offer_s
        self._fetch_s = times.kv_fetch_s
        self._unresponsive: set[str] = set()  # sources that a fetch has timed out on

    def reaches(self, targets: Sequence[str]) -> bool:
        """Returns whether an engine on the devices `targets` can fetch this rank's blocks."""
        rank = self._ranks.rank
        return len(targets) > rank and self._kv.can_offer_to(targets[rank])

    def offer(self, blocks: Ids) -> tuple[str, ...]:
        """Returns the address of these blocks for `Resume.kv_offers`, empty if they cannot be
        offered."""
        try:
            return (self._kv.offer_kv(blocks, deadline_s=self._offer_s).address,)
        except KvcachedError as error:
            log.warning("the KV of a request cannot be offered to its next engine: %s", error)
            return ()

    def fetch(self, resume: Resume, blocks: Ids, skip: int = 0) -> bool:
        """Fetches the offered blocks into `blocks`, without the first `skip` of the offer.

        A collective of the ranks. Returns whether it succeeded on all ranks; if not, the content of
        `blocks` is undefined on all ranks, and the error is logged.
        """
        is_offered = len(resume.kv_offers) == self._ranks.size
        ok = is_offered and self._fetch(resume.kv_offers[self._ranks.rank], blocks, skip)
        return self._ranks.all_true(ok) if self._ranks.size > 1 else ok

    def _fetch(self, address: str, blocks: Ids, skip: int) -> bool:
        """Returns whether the fetch succeeded. A source that has timed out once is not asked again
        for its other requests."""
        source = address.rpartition("/")[0]
        if source in self._unresponsive:
            return False
        started_s = time.monotonic()
        try:
            self._kv.fetch_kv(address, blocks, skip=skip, timeout_s=self._fetch_s)
        except KvcachedError as error:
            log.warning("KV of a request is computed again: %s", error)
            if time.monotonic() - started_s >= self._fetch_s:
                self._unresponsive.add(source)
            return False
        return True


def merge_ranks(parts: Sequence[Request]) -> Request:
    """Returns a request that each rank has exported, with its KV if every rank offers its part."""
    resume = parts[0].resume
    if resume is None:
        return parts[0]
    offers = tuple(o for part in parts if part.resume for o in part.resume.kv_offers)
    kv_tokens = resume.kv_tokens if len(offers) == len(parts) else 0
    joined = Resume(resume.output_ids, "", kv_tokens, offers if kv_tokens else ())
    return msgspec.structs.replace(parts[0], resume=joined)
