"""Latencies and SLO attainment of a simulation, in prism-replay's structs.

The definitions are those of `prism_replay.metrics`, over columns instead of records: a million
requests take a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism_replay.results import (
    Attainment,
    GroupSummary,
    Latency,
    RequestRecord,
    Summary,
    scale_key,
)
from prism_sim.core.records import Records

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of requests. Times are in ms, NaN if a request has no such time."""

    model: NDArray[np.int32]
    # True if the request ended without an error.
    ok: Bools
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    ttft_ms: Floats
    tpot_ms: Floats
    e2e_ms: Floats
    slo_ttft_ms: Floats
    slo_tpot_ms: Floats
    slo_e2e_ms: Floats

    def __len__(self) -> int:
        return len(self.model)

    def of(self, model: int) -> Columns:
        """Returns the rows of one model."""
        chosen = self.model == model
        return Columns(*(getattr(self, name)[chosen] for name in Columns.__slots__))


def columns(records: Records) -> Columns:
    """Returns the columns of a run. REQUIRES: every request has ended."""
    work = records.work
    arrival_s, first_s = np.array(work.arrival_s), np.array(records.first_s)
    end_s, output = np.array(records.end_s), np.array(records.output_tokens)
    ok = np.ones(len(work), dtype=np.bool_)
    ok[list(records.errors)] = False
    nothing = np.full(len(work), np.nan)
    first_ms = np.where(first_s >= 0, (first_s - arrival_s) * 1000, nothing)
    several = ok & (output > 1)
    gaps = np.maximum(output - 1, 1)
    return Columns(
        model=np.array(work.model),
        ok=ok,
        prompt_tokens=np.array(work.prompt_tokens),
        output_tokens=output,
        ttft_ms=first_ms,
        tpot_ms=np.where(several, (end_s - first_s) * 1000 / gaps, nothing),
        e2e_ms=np.where(ok, (end_s - arrival_s) * 1000, nothing),
        slo_ttft_ms=np.array(work.slo_ttft_s) * 1000,
        slo_tpot_ms=np.array(work.slo_tpot_s) * 1000,
        slo_e2e_ms=np.array(work.slo_e2e_s) * 1000,
    )


def attainment(found: Columns, scale: float) -> Attainment:
    """Returns the attainment, as `metrics.attainment` does. An error misses every SLO; an output of
    a single token meets its TPOT SLO."""
    if not len(found):
        return Attainment(0)
    within = met(found, scale)
    every = within["ttft"] & within["tpot"] & within["e2e"]
    parts = {name: float(values.mean()) for name, values in within.items()}
    return Attainment(len(found), **parts, all=float(every.mean()))


def met(found: Columns, scale: float) -> dict[str, Bools]:
    """Returns metric -> mask of the requests within their SLO."""
    return {
        "ttft": found.ok & (found.ttft_ms <= found.slo_ttft_ms * scale),
        "tpot": found.ok & ~(found.tpot_ms > found.slo_tpot_ms * scale),
        "e2e": found.ok & (found.e2e_ms <= found.slo_e2e_ms * scale),
    }


def summarize(records: Records, scales: Sequence[float]) -> Summary:
    """Returns the summary of a run. Models are sorted by number of requests, then by name; those
    without requests are left out."""
    found, work = columns(records), records.work
    seconds = max(float(np.max(np.array(records.end_s))), 1e-9)
    codes = [records.errors.get(i) for i in range(len(work))] if records.errors else []
    total = _group(found, codes, scales)
    groups: dict[str, GroupSummary] = {}
    for index, name in enumerate(work.models):
        chosen = found.of(index)
        if len(chosen):
            own = [c for c, m in zip(codes, work.model, strict=False) if m == index]
            groups[name] = _group(chosen, own, scales)
    names = sorted(groups, key=lambda name: (-groups[name].requests, name))
    return Summary(
        duration_s=seconds,
        requests_per_s=total.completed / seconds,
        output_tokens_per_s=total.output_tokens / seconds,
        total_tokens_per_s=(total.input_tokens + total.output_tokens) / seconds,
        maps_per_minute=0.0,
        unmaps_per_minute=0.0,
        send_lag_p99_ms=0.0,
        total=total,
        models={name: groups[name] for name in names},
    )


def prefix_hits(records: Records) -> dict[str, float]:
    """Returns model, and "total" -> part of its prompt tokens found in a prefix cache. Models
    without requests are left out."""
    work = records.work
    model, prompt = np.array(work.model), np.array(work.prompt_tokens, dtype=np.float64)
    cached = np.array(records.cached_tokens, dtype=np.float64)
    asked = np.bincount(model, prompt, len(work.models))
    found = np.bincount(model, cached, len(work.models))
    hits = {name: float(found[i] / asked[i]) for i, name in enumerate(work.models) if asked[i] > 0}
    return {**hits, "total": float(cached.sum() / prompt.sum())}


def request_records(records: Records, at_most: int) -> list[RequestRecord]:
    """Returns the requests in prism-replay's format, or an evenly spaced sample of `at_most` if
    there are more."""
    found, work = columns(records), records.work
    size = len(work)
    chosen = range(size) if size <= at_most else (i * size // at_most for i in range(at_most))
    return [
        RequestRecord(
            index=i,
            model=work.models[work.model[i]],
            arrival_s=work.arrival_s[i],
            send_lag_ms=0.0,
            input_tokens=work.prompt_tokens[i],
            expected_tokens=work.output_tokens[i],
            output_tokens=records.output_tokens[i],
            ttft_ms=_or_none(found.ttft_ms[i]),
            tpot_ms=_or_none(found.tpot_ms[i]),
            e2e_ms=_or_none(found.e2e_ms[i]),
            slo_ttft_ms=float(found.slo_ttft_ms[i]),
            slo_tpot_ms=float(found.slo_tpot_ms[i]),
            slo_e2e_ms=float(found.slo_e2e_ms[i]),
            error=records.errors.get(i),
        )
        for i in chosen
    ]


def _group(found: Columns, codes: Sequence[str | None], scales: Sequence[float]) -> GroupSummary:
    return GroupSummary(
        requests=len(found),
        completed=int(found.ok.sum()),
        errors=dict(sorted(Counter(code for code in codes if code).items())),
        input_tokens=int(found.prompt_tokens[found.ok].sum()),
        output_tokens=int(found.output_tokens.sum()),
        ttft_ms=_latency(found.ttft_ms[found.ok]),
        tpot_ms=_latency(found.tpot_ms[found.ok]),
        e2e_ms=_latency(found.e2e_ms[found.ok]),
        attainment={scale_key(scale): attainment(found, scale) for scale in scales},
    )


def _latency(values_ms: Floats) -> Latency:
    known = values_ms[~np.isnan(values_ms)]
    if not len(known):
        return Latency()
    p50, p95, p99 = (float(value) for value in np.percentile(known, [50, 95, 99]))
    return Latency(float(known.mean()), p50, p95, p99)


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
