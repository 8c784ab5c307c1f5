"""Which clients give memory back when one needs some: requests, policy, answers.

A client that waits for room asks others to shrink. A `ShrinkPolicy`, a pure function over frozen
data, decides which ones and by how much. The asked process frees on a thread of its own choosing
(its engine's, between two steps): it alone knows which pages a kernel reads. See
`Client.answer_requests`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvcached.checks import checked, each, instance_of, not_negative, optional

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

IDLE_AFTER_S = 1.0


@dataclass(frozen=True)
class Holder:
    """A client as the policy sees it: what it holds, and what it says it could do without.

    `held_bytes` are its pages; giving up those of the minimum helps no other client.
    """

    key: tuple[int, int]
    name: str
    pid: int
    held_bytes: int
    min_bytes: int
    spare_bytes: int  # without a live block
    evictable_bytes: int  # whole slabs of prefix cache alone
    asked_bytes: int  # asked for and not answered yet
    idle_s: float  # since its last allocation
    waits: bool = False
    """It waits for room itself; meanwhile its thread answers no request."""
    answers: bool = True
    """False: it let the time of a request pass, or has just given less than it was asked for."""

    @property
    def above_min_bytes(self) -> int:
        """What it holds beyond its guarantee."""
        return max(0, self.held_bytes - self.min_bytes)

    @property
    def on_the_way_bytes(self) -> int:
        """Of what it was asked for, the part that it can give."""
        return min(self.asked_bytes, self.spare_bytes + self.evictable_bytes, self.above_min_bytes)


@dataclass(frozen=True)
class Demand:
    """One holder's part of a plan; `size_bytes` None: all that it can do without."""

    holder: Holder
    size_bytes: int | None


class ShrinkPolicy(Protocol):
    """(bytes that are missing, the other clients of the device) -> how much each shall give.

    A pure function. Called without any lock, between two reads of the ledger, and perhaps again for
    the rest.
    """

    def __call__(self, missing_bytes: int, holders: Sequence[Holder], /) -> Sequence[Demand]: ...


@checked(missing_bytes=not_negative, holders=each(instance_of(Holder)))
def spares_then_idle_caches(missing_bytes: int, holders: Sequence[Holder]) -> list[Demand]:
    """The default policy: first pages without a live block, then prefix cache; idle clients first.

    Spare pages of all before any prefix-cache page; within each, clients that have been idle for
    `IDLE_AFTER_S` before busy ones (Prism §6.1 evicts idle models first, and only when memory is
    constrained), then those that hold most beyond their minimum. No demand goes below a minimum, to
    a client that waits itself, or to one that does not answer. Less than `missing_bytes` is asked
    for where there is no more.
    """
    willing = [h for h in holders if h.answers and not h.waits]
    willing.sort(key=lambda h: (h.idle_s < IDLE_AFTER_S, -h.above_min_bytes, h.key))
    asked: dict[Holder, int] = {}
    for evicting in (False, True):
        for holder in willing:
            useful_bytes = min(_offer_bytes(holder, evicting), holder.above_min_bytes)
            left_bytes = useful_bytes - holder.on_the_way_bytes - asked.get(holder, 0)
            size_bytes = min(left_bytes, missing_bytes)
            if size_bytes > 0:
                asked[holder] = asked.get(holder, 0) + size_bytes
                missing_bytes -= size_bytes
    return [Demand(holder, size_bytes) for holder, size_bytes in asked.items()]


def _offer_bytes(holder: Holder, evicting: bool) -> int:
    return holder.spare_bytes + (holder.evictable_bytes if evicting else 0)


# --- the asked side --------------------------------------------------------------------------


@dataclass(frozen=True)
class ShrinkRequest:
    """What this client is asked to give back; `size_bytes` None: all that it can do without.

    Others asked for it, or it holds more than its limit.
    """

    number: int
    size_bytes: int | None

    def __post_init__(self) -> None:
        not_negative("number", self.number)
        optional(not_negative)("size_bytes", self.size_bytes)


@dataclass(frozen=True)
class Shrunk:
    """What was given back. `evicted_tokens` of prefix cache made `evicted_bytes` of it free."""

    returned_bytes: int = 0
    evicted_tokens: int = 0
    evicted_bytes: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            not_negative(name, value)

    def __add__(self, other: Shrunk) -> Shrunk:
        return Shrunk(
            self.returned_bytes + other.returned_bytes,
            self.evicted_tokens + other.evicted_tokens,
            self.evicted_bytes + other.evicted_bytes,
        )


class PrefixCache(Protocol):
    """What an engine tells about its prefix cache so that kvcached can choose from it by page."""

    def evictable(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Blocks that no request uses, and when each was last used on any clock: int64 arrays of
        one length, in any order."""

    def evict(self, ids: NDArray[np.int64]) -> int:
        """Forget these blocks, and whatever of the cache is worthless without them, and free them
        with `KVCache.free_kv`. Returns the tokens that went."""


# --- the asking side, from outside -----------------------------------------------------------


@dataclass(frozen=True)
class ShrinkAnswer:
    """What one client made of a request. `outcome`: "answered", "no answer" or "gone"."""

    name: str
    pid: int
    asked_bytes: int | None
    returned_bytes: int
    evicted_tokens: int
    outcome: str
