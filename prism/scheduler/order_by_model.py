"""Order of a device's requests in lanes by model.

A step then reads the first requests of each model instead of all waiting ones.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping

from prism.policies.data import AdmissionOrder

Lane = deque[tuple[int, str]]
LOOK_AHEAD = 16
# Kinds within a priority class: on time, added since the order was computed, late.
ON_TIME, ADDED, LATE, KINDS = 0, 1, 2, 3


class OrderByModel:
    """Order as last computed, with the requests added since. Not thread-safe.

    Priority classes follow each other, the highest first. In a class, requests added since the
    order was computed are between the on-time and the late ones.

    Args:
        order: the computed order.
        waiting: the owner's requests by id. Ids that are not in it any more are skipped.
    """

    def __init__(self, order: AdmissionOrder, waiting: Mapping[str, object]) -> None:
        self._waiting = waiting
        # Place in the order (kind and priority) -> model -> lane.
        self._groups: defaultdict[int, dict[str, Lane]] = defaultdict(dict)
        self._late_ids = {request.id for request in order.late}
        self._count = 0
        for kind, requests in ((ON_TIME, order.on_time), (LATE, order.late)):
            for rank, request in enumerate(requests):
                lanes = self._groups[kind - KINDS * request.priority]
                lanes.setdefault(request.model, deque()).append((rank, request.id))
        self._places = sorted(self._groups)

    def add(self, request_id: str, model: str, priority: int = 0) -> None:
        """Adds a request that is not in the order."""
        self._count += 1
        place = ADDED - KINDS * priority
        if place not in self._groups:
            bisect.insort(self._places, place)
        self._groups[place].setdefault(model, deque()).append((self._count, request_id))

    def clear(self) -> None:
        """Empties the order."""
        if self._groups:
            self._groups.clear()
            self._places, self._late_ids = [], set()

    def models(self) -> set[str]:
        """Returns the models that may have waiting requests."""
        return {model for lanes in self._groups.values() for model in lanes}

    def has_late(self, below: int | None = None) -> bool:
        """Returns whether a late request waits, of a priority lower than `below` if that is set."""
        first = None if below is None else KINDS - KINDS * below
        return any(self._cleaned(lane) for _, lane in self._late_lanes(first))

    def is_late(self, request_id: str) -> bool:
        return request_id in self._late_ids

    def late_heads(self, exclude: Collection[str] = ()) -> list[str]:
        """Returns the oldest late request of each model, oldest first, of any priority.

        Ids in `exclude` are skipped.
        """
        heads: dict[str, tuple[int, str]] = {}
        for model, lane in self._late_lanes():
            head = next((entry for entry in self._left(lane) if entry[1] not in exclude), None)
            if head is not None:
                heads[model] = min(head, heads.get(model, head))
        return [request_id for _, request_id in sorted(heads.values())]

    def _late_lanes(self, first: int | None = None) -> Iterator[tuple[str, Lane]]:
        """Yields (model, lane) of the late requests at places from `first` on."""
        for place in self._places:
            if place % KINDS == LATE and (first is None or place >= first):
                yield from self._groups[place].items()

    def walk(self, models: Collection[str], blocked: Collection[str]) -> Iterator[str]:
        """Yields the ids of `models` in order, each in O(log models).

        The caller may add models to `blocked` during the iteration, which skips their requests.
        """
        lanes = {model: self._lane(model) for model in models if model not in blocked}
        heap: list[tuple[int, int, str, str]] = []
        for model, lane in lanes.items():
            if (entry := next(lane, None)) is not None:
                heap.append((*entry, model))
        heapq.heapify(heap)
        while heap:
            _, _, request_id, model = heap[0]
            if model not in blocked:
                yield request_id
            following = None if model in blocked else next(lanes[model], None)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (*following, model))

    def _lane(self, model: str) -> Iterator[tuple[int, int, str]]:
        for place in self._places:
            if (lane := self._groups[place].get(model)) is not None:
                for rank, request_id in self._left(lane):
                    yield place, rank, request_id

    def _left(self, lane: Lane) -> Iterator[tuple[int, str]]:
        """Yields the entries of a lane that still wait."""
        for entry in tuple(itertools.islice(self._cleaned(lane), LOOK_AHEAD)):
            if entry[1] in self._waiting:
                yield entry
        # Only reached if LOOK_AHEAD requests of one model start in a step.
        for entry in tuple(itertools.islice(lane, LOOK_AHEAD, None)):
            if entry[1] in self._waiting:
                yield entry

    def _cleaned(self, lane: Lane) -> Lane:
        """Returns the lane without leading entries that do not wait any more."""
        while lane and lane[0][1] not in self._waiting:
            lane.popleft()
        return lane
