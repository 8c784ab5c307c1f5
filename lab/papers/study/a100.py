"""Parts that MuxServe's and SeaLLM's evaluations share: A100 GPUs and SLOs by execution time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from lab.papers.study.sources import without_slo
from lab.papers.study.trial import TrialOutcome
from prism_replay.trace import Trace, TraceRequest
from prism_sim.core.profile import execution_s
from prism_sim.costs.catalog import cost_model

GPU = "a100-80"
CHUNK_TOKENS = 8192


def slo(found: TrialOutcome) -> float | None:
    """Returns the attainment of the E2E SLO in percent."""
    return found.percent("e2e")


def with_slos(
    trace: Trace,
    models: Mapping[str, tuple[str, int]],
    scale: float,
    *,
    of_mean: bool = False,
    costs: tuple[Path, ...] = (),
) -> list[TraceRequest]:
    """Returns the trace with E2E SLOs of `scale` times the execution time on an idle engine.

    Args:
        models: Name -> (shape, TP degree).
        of_mean: Scales the mean of the model's requests instead of the request's own time.
        costs: Files of step costs.
    """
    found = {n: cost_model(GPU, shape, tp, files=costs) for n, (shape, tp) in models.items()}
    alone_s: dict[str, list[float]] = {}
    for r in trace:
        found_s = execution_s(found[r.model], r.input_length, r.output_length, CHUNK_TOKENS)
        alone_s.setdefault(r.model, []).append(found_s)
    if of_mean:
        alone_s = {name: [sum(each) / len(each)] * len(each) for name, each in alone_s.items()}
    left = {name: iter(each) for name, each in alone_s.items()}
    return [
        msgspec.structs.replace(
            without_slo(r, r.model), slo_e2e_ms=scale * next(left[r.model]) * 1000
        )
        for r in trace
    ]
