"""Attainment and latency in both worlds, by the same functions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec

from prism.parity.results import Figure, Request
from prism.replay.metrics import attainment, latency
from prism.replay.results import METRICS, RequestRecord, scale_key
from prism.sim.records import Records
from prism.sim.summary import request_records

Records_ = Sequence[RequestRecord]


def simulated_records(records: Records, live: Records_) -> list[RequestRecord]:
    """With the trace's own objectives and indices, so that both are judged alike; times count from
    the trace's arrival as the replay's do, the client's lag included."""
    found = request_records(records, len(live))
    return [
        msgspec.structs.replace(
            ours,
            index=theirs.index,
            arrival_s=theirs.arrival_s,
            send_lag_ms=theirs.send_lag_ms,
            ttft_ms=_later(ours.ttft_ms, theirs),
            e2e_ms=_later(ours.e2e_ms, theirs),
            slo_ttft_ms=theirs.slo_ttft_ms,
            slo_tpot_ms=theirs.slo_tpot_ms,
            slo_e2e_ms=theirs.slo_e2e_ms,
        )
        for ours, theirs in zip(found, live, strict=True)
    ]


def _later(value_ms: float | None, live: RequestRecord) -> float | None:
    return None if value_ms is None else value_ms + max(0.0, live.send_lag_ms)


def figures(
    live: Records_,
    simulated: Records_,
    scales: Sequence[float],
    execution_s: Mapping[str, float],
) -> list[Figure]:
    """Latencies are of requests that both worlds finished. execution_s: model -> mean execution
    time of its requests alone (SeaLLM's equation 1)."""
    found: list[Figure] = []
    for scale in scales:
        ours, theirs = attainment(live, scale), attainment(simulated, scale)
        for metric in (*METRICS, "all"):
            pair = getattr(ours, metric), getattr(theirs, metric)
            name = f"{metric.upper() if metric != 'all' else 'all'} at SLO x{scale_key(scale)}"
            found.append(Figure("attainment", name, "part", *pair))
    done = [(a, b) for a, b in zip(live, simulated, strict=True) if a.ok and b.ok]
    found += _latencies("all models", [a for a, _ in done], [b for _, b in done])
    ours_n = [_normalized(a, execution_s) for a, _ in done]
    theirs_n = [_normalized(b, execution_s) for _, b in done]
    found.append(_mean("all models", "latency / execution time", "x", ours_n, theirs_n))
    for model in sorted({record.model for record in live}):
        own = [(a, b) for a, b in done if a.model == model]
        found += _latencies(model, [a for a, _ in own], [b for _, b in own])
    return found


def samples(live: Records_, simulated: Records_) -> list[Request]:
    return [
        Request(a.index, a.model, a.ttft_ms, b.ttft_ms, a.e2e_ms, b.e2e_ms)
        for a, b in zip(live, simulated, strict=True)
    ]


def _latencies(group: str, live: Records_, simulated: Records_) -> list[Figure]:
    def values(records: Records_, of: Callable[[RequestRecord], float | None]) -> list[float]:
        return [value for record in records if (value := of(record)) is not None]

    found = [
        _mean(
            group,
            "mean normalised latency",
            "s/token",
            values(live, _per_token_s),
            values(simulated, _per_token_s),
        )
    ]
    for metric in METRICS:
        ours = latency(values(live, lambda r, m=metric: r.value_ms(m)))  # type: ignore[misc]
        theirs = latency(values(simulated, lambda r, m=metric: r.value_ms(m)))  # type: ignore[misc]
        name = metric.upper()
        found.append(Figure(group, f"mean {name}", "ms", ours.mean, theirs.mean))
        found.append(Figure(group, f"P95 {name}", "ms", ours.p95, theirs.p95))
    return found


def _mean(
    group: str, name: str, unit: str, live: Sequence[float], simulated: Sequence[float]
) -> Figure:
    return Figure(
        group,
        name,
        unit,
        statistics.fmean(live) if live else None,
        statistics.fmean(simulated) if simulated else None,
    )


def _per_token_s(record: RequestRecord) -> float | None:
    """End to end over output tokens, as Orca and vLLM have it."""
    return None if record.e2e_ms is None else record.e2e_ms / 1000 / max(1, record.output_tokens)


def _normalized(record: RequestRecord, execution_s: Mapping[str, float]) -> float:
    return (record.e2e_ms or 0.0) / 1000 / execution_s[record.model]
