"""Popularity, idleness and burstiness of a trace: the statistics of Prism §3.1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism_replay.generators.base import tail_share
from prism_replay.lengths import Floats
from prism_replay.trace import Trace, TraceRequest, models_of

IDLE_S = 10.0
ACTIVE_WINDOW_S = 120.0
ACTIVE_STEP_S = 10.0
DAY_S = 86400.0


@dataclass(frozen=True)
class ModelStats:
    """Statistics of one model.

    Idle intervals are gaps above 10 s between arrivals, and from arrivals to the trace's ends.
    """

    model: str
    requests: int
    share: float
    """Fraction (0..1) of the trace's requests."""
    rate_cv: float | None
    """Coefficient of variation of requests per minute; None with fewer than two values."""
    gap_cv: float | None
    """Coefficient of variation of the times between arrivals; None with fewer than two."""
    idle_per_hour: float
    median_idle_s: float | None
    """None without idle intervals."""
    idle_time: float
    """Fraction (0..1) of the trace's time in idle intervals."""
    active_time: float
    """Fraction (0..1) of the time with a request in the last 2 minutes."""
    input_tokens: int
    """Sum over the requests."""
    output_tokens: int
    """Sum over the requests."""


@dataclass(frozen=True)
class TraceStats:
    """Statistics of a whole trace. Fractions (0..1) are of the models unless noted."""

    duration_s: float
    requests: int
    models: tuple[ModelStats, ...]
    """Statistics of each model, the most popular first."""
    tail_share: float
    """Fraction of the requests to the last 60 % of the models."""
    rate_cv_above_half: float | None
    """None if no model has such a coefficient of variation, as in a trace of a minute."""
    rate_cv_above_1: float | None
    median_idle_above_30_s: float
    median_idle_above_80_s: float
    idle_per_hour_above_40: float
    idle_time_above_70: float
    active_mean: float
    """Mean fraction with a request in the last 2 minutes, sampled every 10 s."""
    active_p10: float
    """P10 of that fraction."""
    active_p90: float
    """P90 of that fraction."""
    active_changes_per_hour: float
    """Number of models that become active or inactive per hour."""
    day_correlation: float | None
    """Correlation of a model's requests per hour with those of the day before, mean over the
    models. None for traces shorter than 2 days."""


def describe(trace: Trace, duration_s: float | None = None) -> TraceStats:
    """Returns the statistics of `trace`.

    Args:
        duration_s: Length of the trace if it continues after the last arrival.
    """
    end_s = max(duration_s or 0.0, trace[-1].arrival_s, 1e-3)
    groups = by_model(trace)
    models = tuple(_describe_model(name, groups[name], len(trace), end_s) for name in groups)
    times_s = [arrivals_s(requests) for requests in groups.values()]
    active = active_matrix(times_s, end_s)
    fraction = active.mean(axis=0)
    return TraceStats(
        duration_s=end_s,
        requests=len(trace),
        models=models,
        tail_share=tail_share(np.array([m.requests for m in models], dtype=float)),
        rate_cv_above_half=_rate_cv_above(0.5, models),
        rate_cv_above_1=_rate_cv_above(1, models),
        median_idle_above_30_s=_fraction((m.median_idle_s or 0) > 30 for m in models),
        median_idle_above_80_s=_fraction((m.median_idle_s or 0) > 80 for m in models),
        idle_per_hour_above_40=_fraction(m.idle_per_hour > 40 for m in models),
        idle_time_above_70=_fraction(m.idle_time > 0.7 for m in models),
        active_mean=float(fraction.mean()),
        active_p10=float(np.percentile(fraction, 10)),
        active_p90=float(np.percentile(fraction, 90)),
        active_changes_per_hour=float(np.abs(np.diff(active, axis=1)).sum() / end_s * 3600),
        day_correlation=day_correlation(times_s, end_s),
    )


def by_model(trace: Trace) -> dict[str, list[TraceRequest]]:
    """Returns the requests of each model, the most requested model first."""
    groups: dict[str, list[TraceRequest]] = {name: [] for name in models_of(trace)}
    for request in trace:
        groups[request.model].append(request)
    return groups


def day_correlation(times_s: Sequence[Floats], end_s: float) -> float | None:
    """Returns Pearson's correlation of requests per hour on one day and the next.

    The mean over the models for which the correlation exists; None if there are none.
    """
    days = int(end_s // DAY_S)
    found = []
    for each_s in times_s if days > 1 else ():
        hours = np.histogram(each_s, bins=24 * days, range=(0, days * DAY_S))[0].astype(float)
        today, tomorrow = hours[:-24], hours[24:]
        if today.std() > 0 and tomorrow.std() > 0:
            found.append(float(np.corrcoef(today, tomorrow)[0, 1]))
    return float(np.mean(found)) if found else None


def active_matrix(times_s: Sequence[Floats], end_s: float) -> NDArray[np.int64]:
    """Returns [model, sample]: 1 if the model had a request in the 2 minutes before the sample.

    Samples start after the first 2 minutes, or at the end of a shorter trace.
    """
    samples_s = np.arange(min(ACTIVE_WINDOW_S, end_s), end_s + 1e-9, ACTIVE_STEP_S)
    rows = [
        np.searchsorted(each_s, samples_s, side="right")
        > np.searchsorted(each_s, samples_s - ACTIVE_WINDOW_S, side="left")
        for each_s in times_s
    ]
    return np.array(rows, dtype=np.int64)


def coefficient_of_variation(values: Floats) -> float | None:
    """Returns standard deviation / mean; None with fewer than 2 values or a mean of 0."""
    mean = float(values.mean()) if len(values) > 1 else 0.0
    return float(values.std()) / mean if mean > 0 else None


def _describe_model(
    model: str, requests: Sequence[TraceRequest], total: int, end_s: float
) -> ModelStats:
    times_s = arrivals_s(requests)
    gaps_s = np.diff(np.concatenate([[0.0], times_s, [end_s]]))
    idle_s = gaps_s[gaps_s > IDLE_S]
    minutes = np.histogram(times_s, bins=max(1, int(end_s // 60)), range=(0, end_s))[0]
    return ModelStats(
        model=model,
        requests=len(requests),
        share=len(requests) / total,
        rate_cv=coefficient_of_variation(minutes.astype(float)),
        gap_cv=coefficient_of_variation(np.diff(times_s)),
        idle_per_hour=len(idle_s) / end_s * 3600,
        median_idle_s=float(np.median(idle_s)) if len(idle_s) else None,
        idle_time=float(idle_s.sum()) / end_s,
        active_time=float(active_matrix([times_s], end_s).mean()),
        input_tokens=sum(request.input_length for request in requests),
        output_tokens=sum(request.output_length for request in requests),
    )


def arrivals_s(requests: Sequence[TraceRequest]) -> Floats:
    return np.array([request.arrival_s for request in requests])


def _rate_cv_above(limit: float, models: Sequence[ModelStats]) -> float | None:
    if all(model.rate_cv is None for model in models):
        return None
    return _fraction((model.rate_cv or 0) > limit for model in models)


def _fraction(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values)
