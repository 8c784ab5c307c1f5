"""Attainment and latency of both worlds, computed by the same functions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec

from lab.parity.parity_results import Figure, RequestLatencies
from prism_replay.metrics import attainment, latency_of
from prism_replay.results import METRICS, RequestRecord, scale_key
from prism_sim.core.records import Records
from prism_sim.output.summary import request_records

Records_ = Sequence[RequestRecord]
Pairs = Sequence[tuple[RequestRecord, RequestRecord]]
"""(live, simulated) records of each request."""
Value = Callable[[RequestRecord], float | None]


def simulated_records(records: Records, live: Records_) -> list[RequestRecord]:
    """Returns the simulated records with the indices and SLOs of the live ones.

    Like the replay's, their times count from the trace's arrival and include the client's lag.
    """
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
    """Returns the figures of both worlds. Latencies are over requests that both finished.

    Args:
        execution_s: Model -> mean execution time of its requests on an idle engine (SeaLLM's
            equation 1).
    """
    found: list[Figure] = []
    for scale in scales:
        ours, theirs = attainment(live, scale), attainment(simulated, scale)
        for metric in (*METRICS, "all"):
            pair = getattr(ours, metric), getattr(theirs, metric)
            name = f"{metric.upper() if metric != 'all' else 'all'} at SLO x{scale_key(scale)}"
            found.append(Figure("attainment", name, "part", *pair))
    done = [(a, b) for a, b in zip(live, simulated, strict=True) if a.ok and b.ok]

    def normalized(record: RequestRecord) -> float:
        return (record.e2e_ms or 0.0) / 1000 / execution_s[record.model]

    found += _latencies("all models", done)
    found.append(_mean("all models", "latency / execution time", "x", done, normalized))
    for model in sorted({record.model for record in live}):
        found += _latencies(model, [pair for pair in done if pair[0].model == model])
    return found


def samples(live: Records_, simulated: Records_) -> list[RequestLatencies]:
    return [
        RequestLatencies(a.index, a.model, a.ttft_ms, b.ttft_ms, a.e2e_ms, b.e2e_ms)
        for a, b in zip(live, simulated, strict=True)
    ]


def _latencies(group: str, done: Pairs) -> list[Figure]:
    found = [_mean(group, "mean normalised latency", "s/token", done, _per_token_s)]
    for metric in METRICS:
        ours, theirs = (latency_of([pair[world] for pair in done], metric) for world in (0, 1))
        name = metric.upper()
        found.append(Figure(group, f"mean {name}", "ms", ours.mean, theirs.mean))
        found.append(Figure(group, f"P95 {name}", "ms", ours.p95, theirs.p95))
    return found


def _mean(group: str, name: str, unit: str, done: Pairs, of: Value) -> Figure:
    means = []
    for world in (0, 1):
        values = [value for pair in done if (value := of(pair[world])) is not None]
        means.append(statistics.fmean(values) if values else None)
    return Figure(group, name, unit, *means)


def _per_token_s(record: RequestRecord) -> float | None:
    """Returns the E2E latency per output token, as in Orca and vLLM."""
    return None if record.e2e_ms is None else record.e2e_ms / 1000 / max(1, record.output_tokens)
