"""The order of admission, decision by decision.

A decision is a dispatch of the live system that leaves others waiting. It is compared where some of
these wait beside the same request in the simulation as well: equal, if the simulator dispatches it
before all of them. What waits together in one world only is no common choice and is counted apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from prism.parity.results import Compared, Difference
from prism.parity.runs import Run, Wait

BLOCKED = {
    "not ready": "activation timing",
    "slots": "running slots",
    "prefill": "prefill in flight",
    "limit": "KV limit",
    "memory": "free memory",
}


def compare_order(live: Run, simulated: Run) -> Compared:
    """One by one, in the order of the live dispatches."""
    found: list[Difference] = []
    equal = alone = apart = 0
    for chosen, left in _choices(live):
        twin = simulated.waits.get(chosen.request)
        common = [
            (wait, other)
            for wait in left
            if twin is not None
            and (other := simulated.waits.get(wait.request)) is not None
            and other.beside(twin)
        ]
        alone += not left
        apart += bool(left) and not common
        if twin is None or not common:
            continue
        earlier = [(wait, other) for wait, other in common if other.rank < twin.rank]
        if not earlier:
            equal += 1
            continue
        passed, other = min(earlier, key=lambda pair: pair[1].rank)
        found.append(_difference(chosen, passed, twin, other))
    return Compared(equal, found, {"nobody else waited": alone, "no common choice": apart})


def compare_pairs(live: Run, simulated: Run) -> Compared:
    """Every two requests that waited together in both worlds, once."""
    equal, found = 0, list[Difference]()
    for chosen, left in _choices(live):
        twin = simulated.waits.get(chosen.request)
        for wait in left:
            other = simulated.waits.get(wait.request)
            if twin is None or other is None or not other.beside(twin):
                continue
            if twin.rank < other.rank:
                equal += 1
            else:
                found.append(_difference(chosen, wait, twin, other))
    return Compared(equal, found)


def compare_devices(live: Run, simulated: Run) -> Compared:
    """Where each request was served."""
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


def _choices(live: Run) -> Iterator[tuple[Wait, list[Wait]]]:
    """Each dispatch with those that it left waiting, those of its own step included."""
    by_device: Mapping[str, list[Wait]] = defaultdict(list)
    for wait in sorted(live.waits.values(), key=lambda w: (w.device, w.rank)):
        by_device[wait.device].append(wait)
    for waits in by_device.values():
        for number, chosen in enumerate(waits):
            yield chosen, [w for w in waits[number + 1 :] if w.queued < chosen.dispatched]


def _difference(chosen: Wait, passed: Wait, twin: Wait, other: Wait) -> Difference:
    """chosen went before passed live; simulated, as twin and other, it is the reverse."""
    text = (
        f"{chosen.device}: live {chosen.request} of {chosen.model} before {passed.request} of"
        f" {passed.model}, simulated the reverse"
    )
    return Difference(_class(chosen, passed, twin, other), chosen.dispatched_s, text)


def _class(chosen: Wait, passed: Wait, twin: Wait, other: Wait) -> str:
    verdict = chosen.blocked.get(passed.model) or other.blocked.get(twin.model)
    if verdict is not None and chosen.model != passed.model:
        return BLOCKED.get(verdict, verdict)
    if (chosen.queued < passed.queued) != (twin.queued < other.queued):
        return "arrival order"
    if (chosen.is_late, passed.is_late) != (twin.is_late, other.is_late):
        return "lateness"
    return "time estimates"
