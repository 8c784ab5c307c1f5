"""Summary of a simulation, by the functions and in the structs of prism-replay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prism_replay.metrics import Columns, summarize_columns
from prism_replay.results import RequestRecord, Summary
from prism_sim.core.profile import ModelLoad
from prism_sim.core.records import Records


def columns(records: Records, loads: Sequence[ModelLoad] = ()) -> Columns:
    """Returns the columns of a run. loads: As in `summarize`. REQUIRES: every request has ended."""
    work = records.work
    arrival_s, first_s = np.array(work.arrival_s), np.array(records.first_s)
    end_s, output = np.array(records.end_s), np.array(records.output_tokens)
    model, error = np.array(work.model), np.full(len(work), None, dtype=object)
    for index, code in records.errors.items():
        error[index] = code
    ok = np.ones(len(work), dtype=np.bool_)
    ok[list(records.errors)] = False
    nothing = np.full(len(work), np.nan)
    first_ms = np.where(first_s >= 0, (first_s - arrival_s) * 1000, nothing)
    several = ok & (output > 1)
    gaps = np.maximum(output - 1, 1)
    execution_ms = np.array([load.execution_s * 1000 for load in loads])
    return Columns(
        model=model,
        error=error,
        input_tokens=np.array(work.prompt_tokens),
        output_tokens=output,
        arrival_s=arrival_s,
        end_s=end_s,
        ttft_ms=first_ms,
        tpot_ms=np.where(several, (end_s - first_s) * 1000 / gaps, nothing),
        e2e_ms=np.where(ok, (end_s - arrival_s) * 1000, nothing),
        slo_ttft_ms=np.array(work.slo_ttft_s) * 1000,
        slo_tpot_ms=np.array(work.slo_tpot_s) * 1000,
        slo_e2e_ms=np.array(work.slo_e2e_s) * 1000,
        execution_ms=execution_ms[model] if loads else nothing,
    )


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
