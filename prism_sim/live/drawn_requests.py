"""Workload drawn from measured traffic: Poisson arrivals, lengths of the same mean and spread."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from prism.policies.data import Traffic
from prism_sim.core.setup import ModelSetup
from prism_sim.core.workload import Workload

Floats = NDArray[np.float64]


def drawn(
    models: Sequence[ModelSetup], traffic: Mapping[str, Traffic], requests: int, seed: int = 0
) -> Workload:
    """Returns a workload of `requests` requests. Lengths are log-normal, and a whole request fits
    into its model's context. End-to-end SLOs are those that agents count by
    (`Request.e2e_deadline_unix_s`). REQUIRES: a model has a rate above 0."""
    random = np.random.default_rng(seed)
    loads = [traffic[model.name] for model in models]
    rates = np.array([load.mean_rps for load in loads])
    arrival_s = np.cumsum(random.exponential(1 / rates.sum(), requests))
    which = random.choice(len(models), requests, p=rates / rates.sum())

    def column(values: Sequence[float]) -> Floats:
        return np.array(values)[which]

    def lengths(means: Sequence[float], stds: Sequence[float]) -> Floats:
        return _lengths(random, column(means), column(stds))

    context = column([model.context_tokens for model in models])
    output = lengths([x.output_tokens for x in loads], [x.output_std_tokens for x in loads])
    output = np.minimum(output, context - 1)
    prompt = lengths([x.prompt_tokens for x in loads], [x.prompt_std_tokens for x in loads])
    prompt = np.minimum(prompt, context - output)
    slo_ttft_s = column([model.slo_ttft_s for model in models])
    slo_tpot_s = column([model.slo_tpot_s for model in models])
    return Workload(
        models=tuple(model.name for model in models),
        arrival_s=array("d", arrival_s),
        model=array("i", which),
        prompt_tokens=array("i", prompt.astype(int)),
        output_tokens=array("i", output.astype(int)),
        slo_ttft_s=array("d", slo_ttft_s),
        slo_tpot_s=array("d", slo_tpot_s),
        slo_e2e_s=array("d", slo_ttft_s + slo_tpot_s * (output - 1)),
        priority=array("i", bytes(array("i").itemsize * requests)),
    )


def _lengths(random: np.random.Generator, mean: Floats, std: Floats) -> Floats:
    """Returns whole lengths of at least 1."""
    mean = np.maximum(mean, 1.0)
    variance = np.log1p((std / mean) ** 2)  # of the logarithms
    found = mean * np.exp(np.sqrt(variance) * random.standard_normal(len(mean)) - variance / 2)
    return np.maximum(1.0, np.round(found))
