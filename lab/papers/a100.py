"""What MuxServe's and SeaLLM's evaluations share: A100 GPUs, and SLOs by execution time."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from lab.papers.sources import without_slo
from lab.papers.trial import TrialOutcome
from prism_replay.trace import Trace, TraceRequest
from prism_sim.core.profile import execution_s
from prism_sim.costs.catalog import cost_model

GPU = "a100-80"
CHUNK_TOKENS = 8192


def slo(found: TrialOutcome) -> float | None:
    """End-to-end attainment in percent."""
    return found.percent("e2e")


def with_slos(
    trace: Trace, models: Mapping[str, tuple[str, int]], scale: float, *, of_mean: bool = False
) -> list[TraceRequest]:
    """End-to-end SLOs of `scale` times the execution time that a request has alone; or, of_mean,
    times the mean of its model's requests. models: name -> (shape, TP degree)."""
    costs = {name: cost_model(GPU, shape, tp) for name, (shape, tp) in models.items()}
    alone_s: dict[str, list[float]] = {}
    for r in trace:
        found_s = execution_s(costs[r.model], r.input_length, r.output_length, CHUNK_TOKENS)
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
