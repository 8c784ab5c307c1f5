"""Comparison of placement decisions, in order for each model."""

from __future__ import annotations

from collections import defaultdict

from lab.parity.parity_results import Compared, Difference
from lab.parity.runs import History, Placed

Pair = tuple[Placed | None, Placed | None]


def compare_placement(live: History, simulated: History) -> Compared:
    """Compares the aligned decisions of each model.

    Decisions are equal if they have the same kind, device and target.
    """
    found: list[Difference] = []
    equal, shift_s = 0, 0.0
    for model in sorted({p.model for p in (*live.placements, *simulated.placements)}):
        differs = False
        for ours, theirs in _aligned(_of(live, model), _of(simulated, model)):
            if ours is not None and theirs is not None and ours.key == theirs.key:
                equal += 1
                shift_s += abs(max(ours.time_s, 0.0) - max(theirs.time_s, 0.0))
                continue
            kind = "follows another difference" if differs else _class(ours, theirs)
            differs = True
            found.append(_difference(kind, ours, theirs))
    found.sort(key=lambda difference: difference.time_s)
    notes = {"mean time between equal decisions (ms)": round(shift_s / max(1, equal) * 1000)}
    return Compared(equal, found, notes)


def _of(run: History, model: str) -> list[Placed]:
    return [placement for placement in run.placements if placement.model == model]


def _aligned(live: list[Placed], simulated: list[Placed]) -> list[Pair]:
    """Returns the cheapest alignment of the two sequences.

    A different device costs as much as a decision in only one world. Decisions of different kinds
    are never aligned.
    """
    rows, columns = len(live), len(simulated)
    costs = [[i + j for j in range(columns + 1)] for i in range(rows + 1)]
    for i in range(1, rows + 1):
        for j in range(1, columns + 1):
            pair = costs[i - 1][j - 1] + _cost(live[i - 1], simulated[j - 1])
            costs[i][j] = min(pair, costs[i - 1][j] + 1, costs[i][j - 1] + 1)
    return _walk(costs, live, simulated)[::-1]


def _walk(costs: list[list[int]], live: list[Placed], simulated: list[Placed]) -> list[Pair]:
    """Returns the pairs of the cheapest alignment, the last one first."""
    i, j, found = len(live), len(simulated), list[Pair]()
    while i or j:
        paired = bool(i and j)
        if paired and costs[i][j] == costs[i - 1][j - 1] + _cost(live[i - 1], simulated[j - 1]):
            i, j = i - 1, j - 1
            found.append((live[i], simulated[j]))
        elif i and costs[i][j] == costs[i - 1][j] + 1:
            i -= 1
            found.append((live[i], None))
        else:
            j -= 1
            found.append((None, simulated[j]))
    return found


def _cost(live: Placed, simulated: Placed) -> int:
    if live.key == simulated.key:
        return 0
    return 1 if live.kind == simulated.kind else 3


def _class(live: Placed | None, simulated: Placed | None) -> str:
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


def _difference(kind: str, live: Placed | None, simulated: Placed | None) -> Difference:
    first = live or simulated
    assert first is not None
    why = f" ({first.reason})" if first.reason else ""
    text = f"live {live or 'nothing'}; simulated {simulated or 'nothing'}{why}"
    return Difference(kind, first.time_s, text)
