"""Reasons why requests missed their SLOs, from their records and the cluster's decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prism_replay.results import PlacementChange, ReplayResults, RequestRecord

LOADS = ("activate", "migrate")
REASONS = {
    "failed": "got no answer",
    "activation": "waited while the model was activated",
    "queue": "waited for other requests",
    "tokens": "got tokens too slowly",
    "end": "ended too late",
}


def reasons(results: ReplayResults) -> dict[str, Counter[str]]:
    """Returns model -> number of missed requests by their reason, a key of REASONS."""
    loads = [change for change in results.changes if change.kind in LOADS]
    found: dict[str, Counter[str]] = {name: Counter() for name in results.summary.models}
    for record in results.records:
        own = [change for change in loads if change.model == record.model]
        if reason := _reason(record, own):
            found[record.model][reason] += 1
    return found


def _reason(record: RequestRecord, loads: Iterable[PlacementChange]) -> str | None:
    if not record.ok:
        return "failed"
    if _misses(record, "ttft"):
        return "activation" if any(_delays(load, record) for load in loads) else "queue"
    if _misses(record, "tpot"):
        return "tokens"
    return "end" if _misses(record, "e2e") else None


def _misses(record: RequestRecord, metric: str) -> bool:
    value_ms, slo_ms = record.value_ms(metric), record.slo_ms(metric)
    return value_ms is not None and slo_ms is not None and value_ms > slo_ms


def _delays(load: PlacementChange, record: RequestRecord) -> bool:
    """Returns whether the model was loaded in part of the time to the request's first token."""
    assert record.ttft_ms is not None
    first_s = record.arrival_s + record.ttft_ms / 1000
    return load.t_s < first_s and load.t_s + (load.seconds or 0.0) > record.arrival_s


def in_words(counts: Counter[str]) -> str:
    """Returns text such as "5 waited while the model was activated, 1 got no answer"."""
    return ", ".join(f"{counts[key]} {text}" for key, text in REASONS.items() if counts[key])
