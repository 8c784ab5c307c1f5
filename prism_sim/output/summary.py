"""Summary of a simulation, by the functions and in the structs of prism-replay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prism_replay.metrics import summarize_columns
from prism_replay.results import RequestRecord, Summary
from prism_sim.core.columns import columns
from prism_sim.core.profile import ModelLoad
from prism_sim.core.records import Records


def summarize(
    records: Records, scales: Sequence[float], loads: Sequence[ModelLoad] = ()
) -> Summary:
    """Returns the summary of a run. loads: Loads of the models, for the normalised latency."""
    end_s = float(np.max(np.array(records.end_s)))
    return summarize_columns(columns(records, loads), records.work.models, scales, end_s)


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
            failed_ms=_failed_ms(records, i),
            slo_ttft_ms=float(found.slo_ttft_ms[i]),
            slo_tpot_ms=float(found.slo_tpot_ms[i]),
            slo_e2e_ms=float(found.slo_e2e_ms[i]),
            error=records.errors.get(i),
        )
        for i in chosen
    ]


def _failed_ms(records: Records, index: int) -> float | None:
    if index not in records.errors:
        return None
    return (records.end_s[index] - records.work.arrival_s[index]) * 1000


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
