"""Metrics of the papers, computed in one place for replays and simulations. Pure functions.

- Attainment of the TTFT and TPOT SLOs (Prism §7.2) and of the end-to-end SLO (SeaLLM §6.1, MuxServe
  §4.2).
- Tail latency: P99 end to end (SeaLLM §6.1), P95 and P99 of TTFT and TPOT.
- Normalised latency (SeaLLM equation 1 and §6.1).
- Throughput, over the whole time (MuxServe §4.1) and without idle time (Prism §7.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism_replay.results import (
    METRICS,
    Attainment,
    Counters,
    GroupSummary,
    Latency,
    RequestRecord,
    Summary,
    Throughput,
    scale_key,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]
Bools = NDArray[np.bool_]
INTERRUPTED = "interrupted"
_NO_ERROR = np.array(None, dtype=object)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Columns of requests. A million requests are summarised in a second.

    Latencies and SLOs are in ms. A latency is NaN if the request does not have it, an SLO infinite.
    """

    # Index in the names of the models.
    model: Ints
    # Error code; None if the request got all its tokens.
    error: NDArray[np.object_]
    input_tokens: Ints
    output_tokens: Ints
    arrival_s: Floats
    # Time of the last token or of the failure, NaN if unknown.
    end_s: Floats
    ttft_ms: Floats
    tpot_ms: Floats
    e2e_ms: Floats
    slo_ttft_ms: Floats
    slo_tpot_ms: Floats
    slo_e2e_ms: Floats
    # Mean execution time of the model's requests alone, NaN if unknown.
    execution_ms: Floats

    def __len__(self) -> int:
        return len(self.model)

    @property
    def ok(self) -> Bools:
        """True for requests without an error."""
        return np.asarray(self.error == _NO_ERROR, dtype=np.bool_)

    def where(self, chosen: Bools) -> Columns:
        """Returns the chosen rows."""
        return Columns(**{name: getattr(self, name)[chosen] for name in Columns.__slots__})


def columns(
    records: Sequence[RequestRecord], names: Sequence[str], execution_ms: Mapping[str, float]
) -> Columns:
    """Returns the columns of a replay.

    Args:
        records: Requests as the client saw them.
        names: Names of their models.
        execution_ms: Model -> mean execution time of its requests alone, if known.
    """
    number = {name: index for index, name in enumerate(names)}
    errors = np.full(len(records), None, dtype=object)
    errors[:] = [record.error for record in records]
    arrival_s = np.array([record.arrival_s for record in records], dtype=np.float64)
    open_ms = _floats([r.e2e_ms if r.ok else r.failed_ms for r in records], np.nan)
    return Columns(
        model=np.array([number[record.model] for record in records], dtype=np.int64),
        error=errors,
        input_tokens=np.array([record.input_tokens for record in records], dtype=np.int64),
        output_tokens=np.array([record.output_tokens for record in records], dtype=np.int64),
        arrival_s=arrival_s,
        end_s=arrival_s + open_ms / 1000,
        **{f"{m}_ms": _floats([r.value_ms(m) for r in records], np.nan) for m in METRICS},
        **{f"slo_{m}_ms": _floats([r.slo_ms(m) for r in records], np.inf) for m in METRICS},
        execution_ms=_floats([execution_ms.get(r.model) for r in records], np.nan),
    )


def latency(values_ms: Sequence[float] | Floats) -> Latency:
    """Returns mean and percentiles of all but NaN, interpolated linearly between order
    statistics."""
    values = np.asarray(values_ms, dtype=np.float64)
    known = values[~np.isnan(values)]
    if not len(known):
        return Latency()
    p50, p95, p99 = (float(value) for value in np.percentile(known, [50, 95, 99]))
    return Latency(float(known.mean()), p50, p95, p99)


def met(found: Columns, scale: float) -> dict[str, Bools]:
    """Returns metric -> mask of the requests within scale x their SLO.

    A request with an error misses all its SLOs. An output of a single token does not have a TPOT
    and meets its TPOT SLO.
    """
    ok = found.ok
    return {
        "ttft": ok & (found.ttft_ms <= found.slo_ttft_ms * scale),
        "tpot": ok & ~(found.tpot_ms > found.slo_tpot_ms * scale),
        "e2e": ok & (found.e2e_ms <= found.slo_e2e_ms * scale),
    }


def attainment(found: Columns, scale: float) -> Attainment:
    """Returns the fraction of requests within their SLOs (Prism §7.2, SeaLLM §6.1).

    Interrupted requests do not count, nor do requests without an SLO in the attainment of this SLO.
    """
    counted = found.where(found.error != INTERRUPTED)
    within = met(counted, scale)
    judged = {m: np.isfinite(getattr(counted, f"slo_{m}_ms")) for m in METRICS}
    every = np.logical_and.reduce([within[m] | ~judged[m] for m in METRICS])
    some = np.logical_or.reduce(list(judged.values()))
    by_metric = {m: _fraction(within[m][judged[m]]) for m in METRICS}
    return Attainment(len(counted), **by_metric, all=_fraction(every[some]))


def normalized_latency(found: Columns) -> float | None:
    """Returns the mean of the end-to-end latencies of finished requests, each divided by the mean
    execution time of its model's requests alone (SeaLLM equation 1, as the mean of §6.1).

    None if no request finished, or if an execution time is unknown.
    """
    done = found.where(found.ok & ~np.isnan(found.e2e_ms))
    mean = float(np.mean(done.e2e_ms / done.execution_ms)) if len(done) else np.nan
    return None if np.isnan(mean) else mean


def active_s(found: Columns) -> float:
    """Returns the time in which at least one request was open, from its arrival to its last token
    or failure: the time that is not idle (Prism §7.2)."""
    known = ~np.isnan(found.end_s)
    start_s, end_s = found.arrival_s[known], found.end_s[known]
    if not len(start_s):
        return 0.0
    order = np.argsort(start_s, kind="stable")
    start_s, until_s = start_s[order], np.maximum.accumulate(end_s[order])
    idle_s = np.maximum(start_s[1:] - until_s[:-1], 0.0).sum()
    return max(0.0, float(until_s[-1] - start_s[0] - idle_s))


def throughput(found: Columns, duration_s: float) -> Throughput:
    """Returns finished requests and output tokens per second, with idle time and without it.

    Tokens of failed requests count. duration_s: Time of the whole run.
    """
    done, tokens = int(found.ok.sum()), int(found.output_tokens.sum())
    busy_s = active_s(found)
    return Throughput(
        requests_per_s=done / duration_s,
        output_tokens_per_s=tokens / duration_s,
        active_s=busy_s,
        requests_per_active_s=done / busy_s if busy_s else None,
        output_tokens_per_active_s=tokens / busy_s if busy_s else None,
    )


def summarize_group(found: Columns, scales: Sequence[float], duration_s: float) -> GroupSummary:
    done = found.where(found.ok)
    return GroupSummary(
        requests=len(found),
        completed=len(done),
        errors=dict(sorted(Counter(found.error[~found.ok].tolist()).items())),
        input_tokens=int(done.input_tokens.sum()),
        output_tokens=int(found.output_tokens.sum()),
        ttft_ms=latency(done.ttft_ms),
        tpot_ms=latency(done.tpot_ms),
        e2e_ms=latency(done.e2e_ms),
        attainment={scale_key(scale): attainment(found, scale) for scale in scales},
        normalized_latency=normalized_latency(found),
        throughput=throughput(found, duration_s),
    )


def summarize_columns(
    found: Columns,
    names: Sequence[str],
    scales: Sequence[float],
    duration_s: float,
    *,
    counters: Counters | None = None,
    send_lags_ms: Sequence[float] = (),
) -> Summary:
    """Returns the summary of a run of `duration_s`.

    Models are sorted by number of requests, then by name; those without requests are left out.
    """
    seconds = max(duration_s, 1e-9)
    total = summarize_group(found, scales, seconds)
    groups = {
        name: summarize_group(found.where(found.model == index), scales, seconds)
        for index, name in enumerate(names)
    }
    asked = [name for name in names if groups[name].requests]
    order = sorted(asked, key=lambda name: (-groups[name].requests, name))
    grown = counters or Counters()
    return Summary(
        duration_s=duration_s,
        requests_per_s=total.completed / seconds,
        output_tokens_per_s=total.output_tokens / seconds,
        total_tokens_per_s=(total.input_tokens + total.output_tokens) / seconds,
        maps_per_minute=grown.maps / seconds * 60,
        unmaps_per_minute=grown.unmaps / seconds * 60,
        send_lag_p99_ms=latency(send_lags_ms).p99 or 0.0,
        total=total,
        models={name: groups[name] for name in order},
    )


def summarize(
    records: Sequence[RequestRecord],
    scales: Sequence[float],
    duration_s: float,
    counters: Counters | None,
    execution_ms: Mapping[str, float] | None = None,
) -> Summary:
    """Returns the summary of a replay of `duration_s`. execution_ms: As in `columns`."""
    names = sorted({record.model for record in records})
    found = columns(records, names, execution_ms or {})
    lags_ms = [record.send_lag_ms for record in records]
    return summarize_columns(
        found, names, scales, duration_s, counters=counters, send_lags_ms=lags_ms
    )


def _fraction(verdicts: Bools) -> float | None:
    return float(verdicts.mean()) if len(verdicts) else None


def _floats(values: Sequence[float | None], missing: float) -> Floats:
    return np.array([missing if value is None else value for value in values], dtype=np.float64)
