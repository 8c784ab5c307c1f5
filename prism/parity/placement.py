"""Placement decisions, one by one in their order for each model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from itertools import zip_longest

from prism.parity.results import Compared, Difference
from prism.parity.runs import Placement, Run

Pair = tuple[Placement | None, Placement | None]


def compare_placement(live: Run, simulated: Run) -> Compared:
    """Equal: the same kind, device and target at the same place of the model's sequence."""
    found: list[Difference] = []
    equal, apart_s = 0, 0.0
    for model in sorted({p.model for p in (*live.placements, *simulated.placements)}):
        differs = False
        for ours, theirs in _aligned(_of(live, model), _of(simulated, model)):
            if ours is not None and theirs is not None and ours.key == theirs.key:
                equal += 1
                apart_s += abs(max(ours.time_s, 0.0) - max(theirs.time_s, 0.0))
                continue
            kind = "follows another difference" if differs else _class(ours, theirs)
            differs = True
            found.append(_difference(kind, ours, theirs))
    found.sort(key=lambda difference: difference.time_s)
    notes = {"mean time between equal decisions (ms)": round(apart_s / max(1, equal) * 1000)}
    return Compared(equal, found, notes)


def _of(run: Run, model: str) -> list[Placement]:
    return [placement for placement in run.placements if placement.model == model]


def _aligned(live: list[Placement], simulated: list[Placement]) -> Iterator[Pair]:
    matcher = SequenceMatcher(None, _keys(live), _keys(simulated), autojunk=False)
    for _, a, b, c, d in matcher.get_opcodes():
        yield from zip_longest(live[a:b], simulated[c:d])


def _keys(placements: Iterable[Placement]) -> list[tuple[str, str, str]]:
    return [placement.key for placement in placements]


def _class(live: Placement | None, simulated: Placement | None) -> str:
    if live is not None and live.problem:
        return "a live action failed"
    if live is not None and simulated is not None and live.kind == simulated.kind:
        return "another device"
    kinds = defaultdict(
        lambda: "an action in one world only",
        migrate="a migration in one world only",
        evict="an eviction in one world only",
        activate="an activation in one world only",
    )
    only = live or simulated
    assert only is not None
    return kinds[only.kind]


def _difference(kind: str, live: Placement | None, simulated: Placement | None) -> Difference:
    first = live or simulated
    assert first is not None
    why = f" ({first.reason})" if first.reason else ""
    text = f"live {live or 'nothing'}; simulated {simulated or 'nothing'}{why}"
    return Difference(kind, first.time_s, text)
