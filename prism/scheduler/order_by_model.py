"""A device's order, cut into lanes by model, so that a step looks at each model's first requests
instead of at all that wait."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping

from prism.policies.data import AdmissionOrder

Lane = deque[tuple[int, str]]
LOOK_AHEAD = 16
# What each class of priority has: those on time, those that came since, the late ones.
ON_TIME, ADDED, LATE, KINDS = 0, 1, 2, 3


class OrderByModel:
    """The order as last computed: one class of priority after the other, the highest first. In a
    class, requests that came since stand between those on time and the late ones. `waiting`: the
    owner's requests by id; ids that have left it are passed over. Not thread-safe."""

    def __init__(self, order: AdmissionOrder, waiting: Mapping[str, object]) -> None:
        self._waiting = waiting
        # By their place: groups of requests, each a lane for each model.
        self._groups: defaultdict[int, dict[str, Lane]] = defaultdict(dict)
        self._late_ids = {job.id for job in order.late}
        self._count = 0
        for kind, jobs in ((ON_TIME, order.on_time), (LATE, order.late)):
            for rank, job in enumerate(jobs):
                lanes = self._groups[kind - KINDS * job.priority]
                lanes.setdefault(job.model, deque()).append((rank, job.id))
        self._places = sorted(self._groups)

    def add(self, request_id: str, model: str, priority: int = 0) -> None:
        """A request that the order does not know yet."""
        self._count += 1
        place = ADDED - KINDS * priority
        if place not in self._groups:
            bisect.insort(self._places, place)
        self._groups[place].setdefault(model, deque()).append((self._count, request_id))

    def clear(self) -> None:
        """No request waits."""
        if self._groups:
            self._groups.clear()
            self._places, self._late_ids = [], set()

    def models(self) -> set[str]:
        """Models that may have waiting requests."""
        return {model for lanes in self._groups.values() for model in lanes}

    def has_late(self, below: int | None = None) -> bool:
        """A late request waits, of a priority below this one if it is given."""
        first = None if below is None else KINDS - KINDS * below
        return any(self._cleaned(lane) for _, lane in self._late_lanes(first))

    def is_late(self, request_id: str) -> bool:
        return request_id in self._late_ids

    def late_heads(self, besides: Collection[str] = ()) -> list[str]:
        """The oldest late request of each model that is not one of `besides`, oldest first,
        whatever their priorities."""
        heads: dict[str, tuple[int, str]] = {}
        for model, lane in self._late_lanes():
            head = next((entry for entry in self._left(lane) if entry[1] not in besides), None)
            if head is not None:
                heads[model] = min(head, heads.get(model, head))
        return [request_id for _, request_id in sorted(heads.values())]

    def _late_lanes(self, first: int | None = None) -> Iterator[tuple[str, Lane]]:
        """(model, lane), of the places from `first` on."""
        for place in self._places:
            if place % KINDS == LATE and (first is None or place >= first):
                yield from self._groups[place].items()

    def walk(self, models: Collection[str], blocked: Collection[str]) -> Iterator[str]:
        """Ids of `models` in their order; a model that is put into `blocked` on the way yields
        no more. O(log models) for each."""
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
        """Those of a lane that still wait."""
        for entry in tuple(itertools.islice(self._cleaned(lane), LOOK_AHEAD)):
            if entry[1] in self._waiting:
                yield entry
        # rarely so many of one model start in a step
        for entry in tuple(itertools.islice(lane, LOOK_AHEAD, None)):
            if entry[1] in self._waiting:
                yield entry

    def _cleaned(self, lane: Lane) -> Lane:
        """The lane begins with one that waits, or is empty."""
        while lane and lane[0][1] not in self._waiting:
            lane.popleft()
        return lane
