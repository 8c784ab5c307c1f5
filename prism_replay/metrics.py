"""Latency statistics and SLO attainment of a replay (Prism §7.2). Pure functions on records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from prism_replay.results import (
    METRICS,
    Attainment,
    Counters,
    GroupSummary,
    Latency,
    RequestRecord,
    Summary,
    scale_key,
)

Records = Sequence[RequestRecord]


def latency(values_ms: Sequence[float]) -> Latency:
    """Returns mean and percentiles, interpolated linearly between order statistics."""
    if not values_ms:
        return Latency()
    p50, p95, p99 = (float(value) for value in np.percentile(values_ms, [50, 95, 99]))
    return Latency(float(np.mean(values_ms)), p50, p95, p99)


def latency_of(records: Records, metric: str) -> Latency:
    """Returns the latency over the records that have `metric`, one of METRICS."""
    values = [record.value_ms(metric) for record in records]
    return latency([value for value in values if value is not None])


def meets(record: RequestRecord, metric: str, scale: float) -> bool | None:
    """Returns whether `record` is within scale x its SLO; None if it has no such SLO.

    A request with an error misses all its SLOs. A finished request with a single token has no
    TPOT and counts as within its TPOT SLO.
    """
    slo_ms = record.slo_ms(metric)
    if slo_ms is None:
        return None
    value_ms = record.value_ms(metric)
    if not record.ok:
        return False
    return value_ms <= slo_ms * scale if value_ms is not None else metric == "tpot"


def meets_all(record: RequestRecord, scale: float) -> bool | None:
    """Returns whether `record` meets all its SLOs; None if it has none."""
    verdicts = [meets(record, metric, scale) for metric in METRICS]
    judged = [verdict for verdict in verdicts if verdict is not None]
    return all(judged) if judged else None


def attainment(records: Records, scale: float) -> Attainment:
    """Returns the fraction of requests within their SLOs. Interrupted requests do not count."""
    judged = [record for record in records if record.error != "interrupted"]
    by_metric = {m: _fraction([meets(record, m, scale) for record in judged]) for m in METRICS}
    every = _fraction([meets_all(record, scale) for record in judged])
    return Attainment(len(judged), **by_metric, all=every)


def summarize_group(records: Records, scales: Sequence[float]) -> GroupSummary:
    done = [record for record in records if record.ok]
    return GroupSummary(
        requests=len(records),
        completed=len(done),
        errors=dict(sorted(Counter(r.error for r in records if r.error).items())),
        input_tokens=sum(record.input_tokens for record in done),
        output_tokens=sum(record.output_tokens for record in records),
        ttft_ms=latency_of(done, "ttft"),
        tpot_ms=latency_of(done, "tpot"),
        e2e_ms=latency_of(done, "e2e"),
        attainment={scale_key(scale): attainment(records, scale) for scale in scales},
    )


def summarize(
    records: Records, scales: Sequence[float], duration_s: float, counters: Counters | None
) -> Summary:
    """Returns the summary of a replay of `duration_s`; models are ordered by requests."""
    total = summarize_group(records, scales)
    popularity = Counter(record.model for record in records)
    names = sorted(popularity, key=lambda name: (-popularity[name], name))
    seconds = max(duration_s, 1e-9)
    grown = counters or Counters()
    lags_ms = [record.send_lag_ms for record in records]
    return Summary(
        duration_s=duration_s,
        requests_per_s=total.completed / seconds,
        output_tokens_per_s=total.output_tokens / seconds,
        total_tokens_per_s=(total.input_tokens + total.output_tokens) / seconds,
        maps_per_minute=grown.maps / seconds * 60,
        unmaps_per_minute=grown.unmaps / seconds * 60,
        send_lag_p99_ms=latency(lags_ms).p99 or 0.0,
        total=total,
        models={
            name: summarize_group([r for r in records if r.model == name], scales) for name in names
        },
    )


def _fraction(verdicts: Sequence[bool | None]) -> float | None:
    judged = [verdict for verdict in verdicts if verdict is not None]
    return sum(judged) / len(judged) if judged else None
