"""Outcomes of one cluster under several policies and seeds, and rows of their tables: means, single
seeds, and differences between policies."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from prism.errors import KV_MEMORY_EXCEEDED, ContextLengthError
from prism_replay.intervals import Interval, interval
from prism_replay.results import Summary

SCHEMA = "prism-sim-point/1"
ENDS = ("unserved", ContextLengthError.code, KV_MEMORY_EXCEEDED)
"""Error codes of simulated requests."""
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "all": "all SLOs"}
Rows = list[dict[str, Any]]


class PointOutcome(msgspec.Struct, frozen=True):
    """Outcome of one simulation or replay: a summary, or the problem that prevented it, such as a
    model larger than its GPUs."""

    changes: dict[str, Any]
    summary: Summary | None = None
    counts: dict[str, int] = {}
    # Mean part of the time in which an engine computed on a GPU; None: not measured.
    busy: float | None = None
    problem: str = ""
    # Path of the table of its requests, if that was written.
    requests: str = ""
    schema: str = SCHEMA

    def attainment(self, metric: str, scale: str) -> float:
        """Returns the part of the requests that met `metric` ("ttft", "tpot", "e2e", "all") at an
        SLO scale; 0 for a point that could not be simulated."""
        if self.summary is None:
            return 0.0
        value = getattr(self.summary.total.attainment[scale], metric)
        return 0.0 if value is None else float(value)


class SeedGroup(NamedTuple):
    """Outcomes that differ only by their seed."""

    # Changes without the seed.
    changes: dict[str, Any]
    outcomes: Sequence[PointOutcome]

    @property
    def problem(self) -> str:
        return next((o.problem for o in self.outcomes if o.summary is None), "")

    def attainment(self, metric: str) -> Interval:
        """Returns the attainment at the SLO scale nearest to 1. Outcomes that could not be
        simulated count as 0."""
        return interval([o.attainment(metric, self._scale) for o in self.outcomes])

    def judges(self, metric: str) -> bool:
        """Returns whether any request has an SLO of this metric, or whether this is unknown."""
        found = [o.summary.total.attainment[self._scale] for o in self.outcomes if o.summary]
        return not found or any(getattr(each, metric) is not None for each in found)

    @property
    def _scale(self) -> str:
        summary = self.outcomes[0].summary
        scales = summary.total.attainment if summary else {"1"}
        return min(scales, key=lambda scale: abs(float(scale) - 1))


def sweep_rows(groups: Sequence[SeedGroup]) -> Rows:
    """Returns a row per group and SLO scale: means over the seeds, and half-widths if there are
    several seeds."""
    rows = []
    for group in groups:
        summary = group.outcomes[0].summary
        if summary is None or group.problem:
            rows.append({**group.changes, "problem": group.problem})
            continue
        for scale in summary.total.attainment:
            found = [_measured(o, scale) for o in group.outcomes]
            rows.append({**group.changes, "judged_at": scale, **_over_seeds(found), "problem": ""})
    return rows


def _measured(outcome: PointOutcome, scale: str) -> dict[str, float | None]:
    """Returns the values of one point. REQUIRES: it was simulated."""
    summary = outcome.summary
    assert summary is not None
    found = summary.total.attainment[scale]
    return {
        **{f"attainment_{m}": getattr(found, m) for m in METRICS},
        "ttft_p99_ms": summary.total.ttft_ms.p99,
        "tpot_p99_ms": summary.total.tpot_ms.p99,
        "e2e_p99_ms": summary.total.e2e_ms.p99,
        "normalized_latency": summary.total.normalized_latency,
        **msgspec.structs.asdict(summary.total.throughput),
        "failed": summary.total.requests - summary.total.completed,
        "busy": outcome.busy,
        "activations": outcome.counts.get("active", 0),
        "migrations": outcome.counts.get("migrated", 0),
        "retractions": outcome.counts.get("retractions", 0),
        **{code: summary.total.errors.get(code, 0) for code in ENDS},
    }


def _over_seeds(found: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Returns means and half-widths, or the values themselves for a single seed."""
    if len(found) == 1:
        return dict(found[0])
    row: dict[str, Any] = {"seeds": len(found)}
    for name in found[0]:
        values = [value for one in found if (value := one[name]) is not None]
        known = interval(values) if values else None
        row[name] = known and known.mean
        row[f"{name}_ci95"] = known and known.half_width
    return row


def seed_rows(groups: Sequence[SeedGroup]) -> Rows:
    """Returns a row per group, seed and SLO scale."""
    rows = []
    for outcome in (outcome for group in groups for outcome in group.outcomes):
        if outcome.summary is None:
            rows.append({**outcome.changes, "problem": outcome.problem})
            continue
        table = outcome.requests
        for scale in outcome.summary.total.attainment:
            found = _measured(outcome, scale)
            row = {**outcome.changes, "judged_at": scale, **found, "problem": ""}
            rows.append(row | ({"requests": f"points/{table}"} if table else {}))
    return rows


def difference_rows(groups: Sequence[SeedGroup], against: str) -> Rows:
    """Returns a row per SLO scale for each group of another policy than `against`: the differences
    of its values from those of `against` with the same other changes and the same seed, as means
    and half-widths. Returns no rows for single seeds.

    Seeds change the trace, and with it the values of all policies. The differences of pairs do not
    include what they have in common, so that their intervals are narrower than those of the values.
    """
    references = {_others(g): g for g in groups if g.changes.get("policy") == against}
    rows = []
    for group in groups:
        reference = references.get(_others(group))
        if reference is None or reference is group or len(group.outcomes) < 2:
            continue
        about = {**group.changes, "against": against}
        summary, problem = group.outcomes[0].summary, group.problem or reference.problem
        if summary is None or problem:
            rows.append({**about, "problem": problem})
            continue
        for scale in summary.total.attainment:
            pairs = zip(group.outcomes, reference.outcomes, strict=True)
            found = [_less(_measured(one, scale), _measured(other, scale)) for one, other in pairs]
            rows.append({**about, "judged_at": scale, **_over_seeds(found), "problem": ""})
    return rows


def _others(group: SeedGroup) -> str:
    """Returns a key of the changes without the policy."""
    return repr({key: value for key, value in group.changes.items() if key != "policy"})


def _less(values: Mapping[str, float | None], others: Mapping[str, float | None]) -> Any:
    return {
        name: None if value is None or (other := others[name]) is None else value - other
        for name, value in values.items()
    }


# --- files ----------------------------------------------------------------------------------


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a column for each key of any row; cells of missing keys are empty."""
    heads = heads_of(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(heads)
        writer.writerows([row.get(head, "") for head in heads] for row in rows)


def heads_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the keys of all rows, in the order of their first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))
