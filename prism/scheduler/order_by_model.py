"""A device's order, cut into lanes by model, so that a step looks at each model's first requests
instead of at all that wait."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Collection, Iterator, Mapping

from prism.policies.data import AdmissionJob, AdmissionOrder

Lane = deque[tuple[int, str]]
LOOK_AHEAD = 16


class OrderByModel:
    """The order as last computed. Requests that came since stand between those on time and the late
    ones. `waiting`: the owner's requests by id; ids that have left it are passed over. Not
    thread-safe."""

    def __init__(self, order: AdmissionOrder, waiting: Mapping[str, object]) -> None:
        self._waiting = waiting
        self._on_time = _lanes(order.on_time)
        self._late = _lanes(order.late)
        self._late_ids = {job.id for job in order.late}
        self._added: dict[str, Lane] = {}
        self._count = 0

    def add(self, request_id: str, model: str) -> None:
        """A request that the order does not know yet."""
        self._count += 1
        self._added.setdefault(model, deque()).append((self._count, request_id))

    def clear(self) -> None:
        """No request waits."""
        if self._on_time or self._added or self._late:
            self._on_time, self._added, self._late, self._late_ids = {}, {}, {}, set()

    def models(self) -> set[str]:
        """Models that may have waiting requests."""
        return {*self._on_time, *self._added, *self._late}

    def has_late(self) -> bool:
        """A late request waits."""
        return any(self._cleaned(lane) for lane in self._late.values())

    def is_late(self, request_id: str) -> bool:
        return request_id in self._late_ids

    def late_heads(self, besides: Collection[str] = ()) -> list[str]:
        """The oldest late request of each model that is not one of `besides`, oldest first."""
        heads = (
            next((entry for entry in self._left(lane) if entry[1] not in besides), None)
            for lane in self._late.values()
        )
        return [request_id for _, request_id in sorted(head for head in heads if head)]

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
        for group, lanes in enumerate((self._on_time, self._added, self._late)):
            if (lane := lanes.get(model)) is not None:
                for rank, request_id in self._left(lane):
                    yield group, rank, request_id

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


def _lanes(jobs: Collection[AdmissionJob]) -> dict[str, Lane]:
    lanes: dict[str, Lane] = {}
    for rank, job in enumerate(jobs):
        lanes.setdefault(job.model, deque()).append((rank, job.id))
    return lanes
