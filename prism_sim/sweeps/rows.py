"""Rows of the tables over seeds: means, single seeds, and differences between policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from prism.errors import ContextLengthError
from prism_sim.core.setup import KV_MEMORY_EXCEEDED
from prism_sim.sweeps.intervals import interval
from prism_sim.sweeps.points import PointOutcome, SeedGroup

METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "all": "all SLOs"}
ENDS = ("unserved", ContextLengthError.code, KV_MEMORY_EXCEEDED)
"""Error codes of requests."""

Rows = list[dict[str, Any]]


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
