"""Outcomes of requests as columns of prism-replay, which its metrics are computed from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prism_replay.metrics import Columns
from prism_sim.core.profile import ModelLoad
from prism_sim.core.records import Records


def columns(records: Records, loads: Sequence[ModelLoad] = ()) -> Columns:
    """Returns the columns of a run. REQUIRES: every request has ended.

    loads: Loads of the models, for the normalised latency.
    """
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
