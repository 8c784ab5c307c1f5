"""Setup of MuxServe's evaluation (§4.1, §4.2): LLaMA models, A100 GPUs, rates by power law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lab.papers.study.a100 import GPU, with_slos
from lab.papers.study.lab import Lab
from lab.papers.study.trial import TrialOutcome
from lab.papers.study.tuning import ONE_POLICY, RULE, Tuned, tune, tuning_lab
from prism_replay.generators.base import generate
from prism_replay.generators.steady import SteadyConfig, renewals
from prism_replay.lengths import Lengths, LengthSource, requests_at
from prism_replay.trace import Trace, TraceRequest
from prism_sim.costs.grid import MUXSERVE

SLO_SCALE = 8.0
CONTEXT = 8192
"""More than the models' 2048 tokens: the paper does not say how it cut ShareGPT's."""
DEGREES = {"llama-7b": 1, "llama-13b": 1, "llama-30b": 2, "llama-65b": 4}
"""Model -> smallest number of GPUs with enough memory for it and KV."""

SYSTEMS = {
    "muxserve": ("muxserve", ""),
    "spatial": ("dedicated", ""),
    "temporal": ("muxserve", "fcfs"),
}
"""Name -> (policy, variant). With spatial sharing, each model is on dedicated GPUs. Temporal
sharing is MuxServe's placement and unified KV memory with first come first served (§4.1)."""

GIVEN_AHEAD = (
    " All systems know the rates and mean lengths of the whole trace. Spatial sharing assigns GPUs "
    "by computation; temporal sharing has MuxServe's own placement."
)
FAIR = ONE_POLICY + GIVEN_AHEAD
FAIR_TUNED = RULE + GIVEN_AHEAD


@dataclass(frozen=True)
class PopularModel:
    name: str
    shape: str
    rank: int = 0
    """Rank of popularity; 0 is the most popular."""
    share: float | None = None
    """Weight of its requests, used instead of the rank."""


def models_of(shapes: Sequence[str], shares: Sequence[float | None] = ()) -> list[PopularModel]:
    """Returns models with these shapes, the most popular first."""
    given = shares or [None] * len(shapes)
    pairs = enumerate(zip(shapes, given, strict=True))
    return [PopularModel(f"m{i}", shape, i, share) for i, (shape, share) in pairs]


def nineteen() -> list[PopularModel]:
    """Returns the models of Table 1, with the larger ones spread over the ranks.

    12 are of 7B, 4 of 13B, 2 of 30B and 1 of 65B.
    """
    shapes = ["llama-7b"] * 12
    for place, size in ((2, 13), (5, 30), (7, 13), (10, 65), (12, 13), (14, 30), (17, 13)):
        shapes.insert(place, f"llama-{size}b")
    return models_of(shapes)


def power_law(
    lab: Lab, models: Sequence[PopularModel], rate_rps: float, alpha: float, seconds: float
) -> Trace:
    """Returns a trace with rates by rank^-alpha, Poisson arrivals and ShareGPT's lengths."""
    names = tuple(m.name for m in sorted(models, key=lambda m: m.rank))
    config = SteadyConfig(names, seconds, rate_rps, lab.seed, lab.sources.sharegpt(), alpha)
    return _with_slos(generate(config), models)


def drawn_by_share(
    lab: Lab,
    models: Sequence[PopularModel],
    rate_rps: float,
    seconds: float,
    lengths: Mapping[str, LengthSource] | None = None,
) -> Trace:
    """Returns a trace with Poisson arrivals, each for a model drawn by its `share`."""
    rng = np.random.default_rng([lab.seed, 7])
    moments_s = renewals(rate_rps, 1.0, seconds, rng)
    shares = np.array([m.share or 0.0 for m in models])
    drawn = rng.choice(len(models), size=len(moments_s), p=shares / shares.sum())
    trace: list[TraceRequest] = []
    for number, model in enumerate(models):
        source = (lengths or {}).get(model.name) or lab.sources.sharegpt()
        trace += requests_at(model.name, moments_s[drawn == number], source, rng)
    return _with_slos(sorted(trace, key=lambda r: r.timestamp), models)


def longer(given: Lengths, inputs: float, outputs: float) -> Lengths:
    """Returns the lengths multiplied by these factors, of at most 2048 tokens."""
    return replace(
        given,
        input_median=given.input_median * inputs,
        input_max=2048,
        output_median=given.output_median * outputs,
        output_max=2048,
    )


def _with_slos(trace: Trace, models: Sequence[PopularModel]) -> Trace:
    shapes = {m.name: (m.shape, DEGREES[m.shape]) for m in models}
    return with_slos(trace, shapes, SLO_SCALE, costs=(MUXSERVE,))


def cluster(models: Sequence[PopularModel], gpus: int) -> dict[str, Any]:
    """Returns a setup with nodes of 8 GPUs and the measured steps of MuxServe's engine.

    Only the E2E SLO counts; the others are loose.
    """
    return {
        "cost_files": [str(MUXSERVE)],
        "gpus": {"type": GPU, "count": gpus, "nodes": max(1, gpus // 8), "engines": 32},
        "models": [
            {"name": m.name, "shape": m.shape, "tp": DEGREES[m.shape], "context_length": CONTEXT}
            for m in models
        ],
        "slo": {"ttft": "60s", "tpot": "1s"},
        "patience": "60s",
    }


TUNING_RPS = 20.0
TUNING_ALPHA = 0.9


def tuned_systems(lab: Lab) -> Tuned:
    """Returns the tuned systems for all studies that compare systems.

    The most popular model has TUNING_RPS.
    """
    there, models = tuning_lab(lab), nineteen()
    most, seconds = lab.pick(TUNING_RPS, 1.0), lab.pick(40.0, 8.0)
    rate = most * sum((m.rank + 1) ** -TUNING_ALPHA for m in models)
    trace = power_law(there, models, rate, TUNING_ALPHA, seconds)
    config = lab.setup("tuning", cluster(models, 32), trace)
    load = (
        f"another trace of Figure 5's, {seconds:g} s, alpha {TUNING_ALPHA:g}, up to {most:g} req/s"
    )
    what = "throughput weighted by rate (req/s)"
    return tune(lab, [config], SYSTEMS, throughput, load=load, what=what)


def throughput(found: TrialOutcome) -> float | None:
    """Returns the throughput, averaged over the models by rate (§4.1)."""
    return None if found.summary is None else found.weighted_rps
