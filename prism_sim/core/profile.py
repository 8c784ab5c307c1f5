"""Load of each model in a trace: rates, lengths, execution times.

Policies that search placements or control steps get these as if they were profiled in advance.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from prism_sim.core.setup import ClusterSetup, ModelSetup
from prism_sim.core.workload import NO_SLO, Workload
from prism_sim.costs.model import CostModel, prompt_s

PROFILED_REQUESTS = 500


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Means over the requests of one model that its engine can serve. The defaults are for a model
    without such requests."""

    requests: int = 0
    rate_rps: float = 0.0
    prompt_tokens: float = 1.0
    output_tokens: float = 1.0
    # Time of a request that runs alone on the model's own GPUs.
    execution_s: float = 1.0
    execution_std_s: float = 0.0
    # End-to-end SLO.
    slo_s: float = NO_SLO


def loads(setup: ClusterSetup, work: Workload, until_s: float | None = None) -> list[ModelLoad]:
    """Returns the load of each model. until_s: length of the workload, default its last arrival."""
    seconds = max(work.end_s if until_s is None else until_s, 1.0)
    by_model: list[list[int]] = [[] for _ in setup.models]
    for index, model in enumerate(work.model):
        tokens = work.prompt_tokens[index] + work.output_tokens[index]
        if setup.models[model].refusal(tokens) is None:
            by_model[model].append(index)
    return [
        _load(model, work, by_model[model.index], seconds, setup.engine.prefill_chunk_tokens)
        for model in setup.models
    ]


def _load(
    model: ModelSetup, work: Workload, indices: list[int], seconds: float, chunk_tokens: int
) -> ModelLoad:
    if not indices:
        return ModelLoad()
    cost = model.parts[model.tp].cost
    stride = max(1, len(indices) // PROFILED_REQUESTS)
    times_s = [
        execution_s(cost, work.prompt_tokens[i], work.output_tokens[i], chunk_tokens)
        for i in indices[::stride]
    ]
    return ModelLoad(
        requests=len(indices),
        rate_rps=len(indices) / seconds,
        prompt_tokens=statistics.fmean(work.prompt_tokens[i] for i in indices),
        output_tokens=statistics.fmean(work.output_tokens[i] for i in indices),
        execution_s=statistics.fmean(times_s),
        execution_std_s=statistics.pstdev(times_s),
        slo_s=statistics.fmean(work.slo_e2e_s[i] for i in indices),
    )


def execution_s(cost: CostModel, prompt: int, output: int, chunk_tokens: int) -> float:
    """Returns the time of a request that runs alone."""
    return prompt_s(cost, prompt, chunk_tokens) + cost.decode_run_s(1, prompt, output - 1)
