"""Attainment and latency of both worlds, computed by the same functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from lab.parity.parity_results import Figure, RequestLatencies
from prism_replay.metrics import Columns, Floats, attainment, columns, latency, normalized_latency
from prism_replay.results import METRICS, RequestRecord, scale_key
from prism_sim.core.records import Records
from prism_sim.output.summary import request_records

Records_ = Sequence[RequestRecord]


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
    names = sorted(execution_s)
    execution_ms = {name: 1000 * seconds for name, seconds in execution_s.items()}
    both = [columns(records, names, execution_ms) for records in (live, simulated)]
    for scale in scales:
        ours, theirs = (attainment(each, scale) for each in both)
        for metric in (*METRICS, "all"):
            pair = getattr(ours, metric), getattr(theirs, metric)
            name = f"{metric.upper() if metric != 'all' else 'all'} at SLO x{scale_key(scale)}"
            found.append(Figure("attainment", name, "part", *pair))
    finished = both[0].ok & both[1].ok
    done = [each.where(finished) for each in both]
    found += _latencies("all models", done)
    times = [normalized_latency(each) for each in done]
    found.append(Figure("all models", "latency / execution time", "x", *times))
    for model in sorted({record.model for record in live}):
        own = [each.where(each.model == names.index(model)) for each in done]
        found += _latencies(model, own)
    return found


def samples(live: Records_, simulated: Records_) -> list[RequestLatencies]:
    return [
        RequestLatencies(a.index, a.model, a.ttft_ms, b.ttft_ms, a.e2e_ms, b.e2e_ms)
        for a, b in zip(live, simulated, strict=True)
    ]


def _latencies(group: str, both: Sequence[Columns]) -> list[Figure]:
    means = [latency(_per_token_s(each)).mean for each in both]
    found = [Figure(group, "mean normalised latency", "s/token", *means)]
    for metric in METRICS:
        ours, theirs = (latency(getattr(each, f"{metric}_ms")) for each in both)
        name = metric.upper()
        found.append(Figure(group, f"mean {name}", "ms", ours.mean, theirs.mean))
        found.append(Figure(group, f"P95 {name}", "ms", ours.p95, theirs.p95))
    return found


def _per_token_s(found: Columns) -> Floats:
    """Returns the E2E latencies per output token, as in Orca and vLLM."""
    return found.e2e_ms / 1000 / np.maximum(1, found.output_tokens)
