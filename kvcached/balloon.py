"""Shrink requests between clients: the policy's input, its demands, and the answers.

A client that waits for room asks others to shrink. A `ShrinkPolicy`, a pure function over frozen
data, decides which clients give how much. The asked process frees memory on its own engine's
thread, between two steps, since only the engine knows which pages a kernel reads. See
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
    """Client as the policy sees it."""

    key: tuple[int, int]
    """Slot in the ledger, and the client's number."""
    name: str
    pid: int
    held_bytes: int
    """Bytes of its pages."""
    min_bytes: int
    """Guaranteed bytes. Giving these up helps no other client."""
    spare_bytes: int
    """Bytes of pages without a live block."""
    evictable_bytes: int
    """Bytes of whole slabs that hold prefix cache alone."""
    asked_bytes: int
    """Bytes of its unanswered request."""
    idle_s: float
    """Seconds since its last allocation."""
    waits: bool = False
    """True while the client waits for room; its thread answers no request meanwhile."""
    answers: bool = True
    """False if the client missed a request's deadline, or has just given less than requested."""

    @property
    def above_min_bytes(self) -> int:
        """Bytes held beyond the guaranteed minimum."""
        return max(0, self.held_bytes - self.min_bytes)

    @property
    def on_the_way_bytes(self) -> int:
        """Part of `asked_bytes` that the client can give."""
        return min(self.asked_bytes, self.spare_bytes + self.evictable_bytes, self.above_min_bytes)


@dataclass(frozen=True)
class Demand:
    """One holder's part of a plan. `size_bytes` None means all that it can give up."""

    holder: Holder
    size_bytes: int | None


class ShrinkPolicy(Protocol):
    """(missing bytes, the device's other clients) -> how much each of them shall give.

    A pure function. Called without a lock between two reads of the ledger, and called again if the
    ledger changed or bytes are still missing.
    """

    def __call__(self, missing_bytes: int, holders: Sequence[Holder], /) -> Sequence[Demand]: ...


@checked(missing_bytes=not_negative, holders=each(instance_of(Holder)))
def spares_then_idle_caches(missing_bytes: int, holders: Sequence[Holder]) -> list[Demand]:
    """Takes pages without a live block first, then prefix cache, and idle clients first. The
    default.

    Spare pages of all clients come before any prefix-cache page. Within each kind, clients idle for
    `IDLE_AFTER_S` come before busy ones (Prism §6.1 evicts idle models first, and only when memory
    is constrained), then those that hold most beyond their minimum. No demand goes below a minimum,
    to a client that waits itself, or to a client that does not answer. The demands sum to less than
    `missing_bytes` if the clients do not have as much.
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


# --- the client that is asked ----------------------------------------------------------------


@dataclass(frozen=True)
class ShrinkRequest:
    """Bytes that this client is asked to give back. `size_bytes` None means all it can give up.

    Other clients asked for them, or the client holds more than its limit.
    """

    number: int
    size_bytes: int | None

    def __post_init__(self) -> None:
        not_negative("number", self.number)
        optional(not_negative)("size_bytes", self.size_bytes)


@dataclass(frozen=True)
class Shrunk:
    """Memory that was given back."""

    returned_bytes: int = 0
    """All bytes that were given back."""
    evicted_tokens: int = 0
    """Prefix-cache tokens that were evicted."""
    evicted_bytes: int = 0
    """Part of `returned_bytes` that became free by evicting those tokens."""

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
    """Engine's prefix cache, from which kvcached chooses blocks to evict page by page."""

    def evictable(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the blocks that no request uses, and when each was last used, on any clock.

        Two int64 arrays of equal length, in any order.
        """

    def evict(self, ids: NDArray[np.int64]) -> int:
        """Drops these blocks and all cache entries that are useless without them.

        Frees them with `KVCache.free_kv`. Returns the number of evicted tokens.
        """


# --- requests by other processes (`Device.shrink`) -------------------------------------------


@dataclass(frozen=True)
class ShrinkAnswer:
    """One client's answer to a request. `outcome`: "answered", "no answer" or "gone"."""

    name: str
    pid: int
    asked_bytes: int | None
    returned_bytes: int
    evicted_tokens: int
    outcome: str
