"""Comparison of the order of admission, decision by decision.

A decision is a dispatch of the live system that leaves other requests waiting. It is compared if
some of these requests wait together with the dispatched one in the simulation too. It is equal if
the simulator dispatches that request before all of them. Dispatches without such common requests
are counted separately.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from lab.parity.causes import Causes
from lab.parity.parity_results import Compared, Difference
from lab.parity.runs import History, Wait

BLOCKED = {
    "not ready": "activation timing",
    "slots": "running slots",
    "prefill": "prefill in flight",
    "limit": "KV limit",
    "memory": "free memory",
}


def compare_order(live: History, simulated: History, causes: Causes | None = None) -> Compared:
    """Compares each live dispatch in order. Each difference is added to `causes`."""
    found: list[Difference] = []
    equal = alone = separate = 0
    for chosen, left in _choices(live):
        alone += not left
        common = _common(chosen, left, simulated)
        separate += bool(left) and not common
        if not common:
            continue
        twin = simulated.waits[chosen.request]
        earlier = [(wait, other) for wait, other in common if other.rank < twin.rank]
        if not earlier:
            equal += 1
            continue
        passed, other = min(earlier, key=lambda pair: pair[1].rank)
        found.append(_difference(chosen, passed, twin, other, causes))
        if causes is not None:
            causes.add_difference(chosen)
    return Compared(equal, found, {"no other request waited": alone, "no common choice": separate})


def compare_pairs(live: History, simulated: History, causes: Causes | None = None) -> Compared:
    """Compares the order of each pair of requests that waited together in both worlds."""
    equal, found = 0, list[Difference]()
    for chosen, left in _choices(live):
        for wait, other in _common(chosen, left, simulated):
            twin = simulated.waits[chosen.request]
            if twin.rank < other.rank:
                equal += 1
            else:
                found.append(_difference(chosen, wait, twin, other, causes))
    return Compared(equal, found)


def compare_positions(live: History, simulated: History, causes: Causes | None = None) -> Compared:
    """Compares the positions of the requests that waited together with another in both worlds.

    The differences are the smallest set of requests to move for equal orders. A request that
    overtakes five others is one difference here, but up to five in `compare_order`.
    """
    equal, found = 0, list[Difference]()
    for waits in _common_queues(live, simulated):
        twins = [simulated.waits[wait.request] for wait in waits]
        kept = _longest_rising([twin.rank for twin in twins])
        equal += len(kept)
        for place in sorted(set(range(len(waits))) - kept):
            found.append(_moved(place, waits, twins, kept, causes))
    found.sort(key=lambda difference: difference.time_s)
    return Compared(equal, found)


def _common_queues(live: History, simulated: History) -> Iterator[list[Wait]]:
    """Yields the requests with a common choice in live order, per (live, simulated) device.

    The devices differ if a model with copies is served on another one in the simulation.
    """
    chosen: dict[tuple[str, str], dict[int, Wait]] = defaultdict(dict)
    for first, left in _choices(live):
        for wait, other in _common(first, left, simulated):
            devices = first.device, other.device
            chosen[devices] |= {first.request: first, wait.request: wait}
    for waits in chosen.values():
        yield sorted(waits.values(), key=lambda wait: wait.rank)


def _longest_rising(ranks: Sequence[int]) -> set[int]:
    """Returns the indices of a longest increasing subsequence."""
    tails: list[int] = []
    before: list[int | None] = []
    for place, rank in enumerate(ranks):
        length = bisect_left(tails, rank, key=lambda tail: ranks[tail])
        before.append(tails[length - 1] if length else None)
        tails[length : length + 1] = [place]
    kept: set[int] = set()
    last = tails[-1] if tails else None
    while last is not None:
        kept.add(last)
        last = before[last]
    return kept


def _moved(
    place: int,
    waits: Sequence[Wait],
    twins: Sequence[Wait],
    kept: Collection[int],
    causes: Causes | None,
) -> Difference:
    """Returns the difference with the first unmoved request that this one changed order with."""
    for other in sorted(kept):
        if (place < other) != (twins[place].rank < twins[other].rank):
            first, second = min(place, other), max(place, other)
            ours, theirs = (waits[first], waits[second]), (twins[first], twins[second])
            return _difference(*ours, *theirs, causes)
    raise AssertionError("a request that changed order with no other is part of the sequence")


def compare_devices(live: History, simulated: History) -> Compared:
    """Compares the device on which each request was served."""
    equal, found = 0, list[Difference]()
    for index, wait in sorted(live.waits.items()):
        twin = simulated.waits.get(index)
        where = "nowhere" if twin is None else twin.device
        if where == wait.device:
            equal += 1
            continue
        text = f"request {index} of {wait.model}: {wait.device} live, {where} simulated"
        found.append(Difference("model placed elsewhere", wait.queued_s, text))
    return Compared(equal, found)


def _choices(live: History) -> Iterator[tuple[Wait, list[Wait]]]:
    """Yields each dispatch with the requests left waiting, including those of the same step."""
    by_device: Mapping[str, list[Wait]] = defaultdict(list)
    for wait in sorted(live.waits.values(), key=lambda w: (w.device, w.rank)):
        by_device[wait.device].append(wait)
    for waits in by_device.values():
        for number, chosen in enumerate(waits):
            yield chosen, [w for w in waits[number + 1 :] if w.queued < chosen.dispatched]


def _common(chosen: Wait, left: Sequence[Wait], simulated: History) -> list[tuple[Wait, Wait]]:
    """Returns (live, simulated) of those in `left` that also wait with `chosen` in simulation."""
    twin = simulated.waits.get(chosen.request)
    if twin is None:
        return []
    pairs = [(wait, simulated.waits.get(wait.request)) for wait in left]
    return [(wait, other) for wait, other in pairs if other is not None and other.overlaps(twin)]


def _difference(
    chosen: Wait, passed: Wait, twin: Wait, other: Wait, causes: Causes | None
) -> Difference:
    """Returns the difference: `chosen` before `passed` live, `other` before `twin` simulated."""
    shift = _time_shift(other.dispatched_s - chosen.dispatched_s)
    text = (
        f"{chosen.device}: live {chosen.request} of {chosen.model} before {passed.request} of"
        f" {passed.model}; simulated the reverse, {shift}"
    )
    kind = _class(chosen, passed, twin, other, causes)
    return Difference(kind, chosen.dispatched_s, text)


def _time_shift(seconds: float) -> str:
    return f"{abs(seconds) * 1000:.0f} ms {'later' if seconds > 0 else 'earlier'}"


def _class(chosen: Wait, passed: Wait, twin: Wait, other: Wait, causes: Causes | None) -> str:
    verdict = chosen.blocked.get(passed.model) or other.blocked.get(twin.model)
    if verdict is not None and chosen.model != passed.model:
        return BLOCKED.get(verdict, verdict)
    if (chosen.queued < passed.queued) != (twin.queued < other.queued):
        return "arrival order"
    if causes is not None and (cause := causes.of(chosen, passed, twin, other)):
        return cause
    if (chosen.is_late, passed.is_late) != (twin.is_late, other.is_late):
        return "lateness"
    return "time estimates"
