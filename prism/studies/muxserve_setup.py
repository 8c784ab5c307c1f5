"""What MuxServe's evaluation runs on (§4.1, §4.2): LLaMA models, A100 GPUs, rates by power law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from prism.costs.catalog import cost_model
from prism.replay.generate import LengthSource, requests_at
from prism.replay.steady import SteadyConfig, generate_steady, renewals
from prism.replay.trace import Trace, TraceRequest
from prism.sim.profile import execution_s
from prism.studies.lab import Lab
from prism.studies.prism_setup import row
from prism.studies.sources import without_slo
from prism.studies.trial import Measured
from prism.studies.tuning import RULE, Tuned, elsewhere, tune

GPU = "a100-80"
SLO_SCALE = 8.0
CHUNK_TOKENS = 8192
DEGREES = {"llama-7b": 1, "llama-13b": 1, "llama-30b": 2, "llama-65b": 4}
"""The fewest GPUs that hold a model with room for KV."""

SYSTEMS = {
    "muxserve": ("muxserve", ""),
    "spatial": ("dedicated", ""),
    "temporal": ("muxserve", "fcfs"),
}
"""name -> (policy, variant). Spatial: each model alone; temporal: MuxServe's placement and unified
KV memory, first come first served (§4.1)."""

GIVEN_AHEAD = (
    " All systems are given the whole trace's rates and mean lengths; spatial gets GPUs by "
    "computation, temporal MuxServe's own placement."
)
FAIR = "Parts of one policy are compared: it runs with the shipped settings." + GIVEN_AHEAD
FAIR_TUNED = RULE + "." + GIVEN_AHEAD


@dataclass(frozen=True)
class Model:
    """rank: of popularity, 0 first; or `share` of the requests in its place."""

    name: str
    shape: str
    rank: int = 0
    share: float | None = None


def nineteen() -> list[Model]:
    """Table 1: 12 of 7B, 4 of 13B, 2 of 30B, 1 of 65B; larger ones spread over the ranks."""
    shapes = ["llama-7b"] * 12
    for place, shape in ((2, "llama-13b"), (5, "llama-30b"), (7, "llama-13b"), (10, "llama-65b")):
        shapes.insert(place, shape)
    for place, shape in ((12, "llama-13b"), (14, "llama-30b"), (17, "llama-13b")):
        shapes.insert(place, shape)
    return [Model(f"m{i}", shape, i) for i, shape in enumerate(shapes)]


def power_law(
    lab: Lab, models: Sequence[Model], rate_rps: float, alpha: float, seconds: float
) -> Trace:
    """Rates by rank^-alpha, Poisson arrivals, ShareGPT's lengths; SLOs of SLO_SCALE execution
    times."""
    names = tuple(m.name for m in sorted(models, key=lambda m: m.rank))
    config = SteadyConfig(
        names, seconds, rate_rps, alpha, seed=lab.seed, lengths=lab.sources.sharegpt()
    )
    return with_deadlines(generate_steady(config), models)


def shared_out(
    lab: Lab,
    models: Sequence[Model],
    rate_rps: float,
    seconds: float,
    lengths: Mapping[str, LengthSource] | None = None,
) -> Trace:
    """Poisson arrivals, each of a model drawn by its `share`."""
    rng = np.random.default_rng([lab.seed, 7])
    moments_s = renewals(rate_rps, 1.0, seconds, rng)
    shares = np.array([m.share or 0.0 for m in models])
    drawn = rng.choice(len(models), size=len(moments_s), p=shares / shares.sum())
    trace: list[TraceRequest] = []
    for number, model in enumerate(models):
        source = (lengths or {}).get(model.name) or lab.sources.sharegpt()
        trace += requests_at(model.name, moments_s[drawn == number], source, rng)
    return with_deadlines(sorted(trace, key=lambda r: r.timestamp), models)


def with_deadlines(
    trace: Trace, models: Sequence[Model], scale: float = SLO_SCALE
) -> list[TraceRequest]:
    """An end-to-end SLO of `scale` times the request's execution time alone."""
    shapes = {m.name: m.shape for m in models}
    costs = {s: cost_model(GPU, s, DEGREES[s]) for s in set(shapes.values())}
    found = []
    for request in trace:
        cost = costs[shapes[request.model]]
        alone_s = execution_s(cost, request.input_length, request.output_length, CHUNK_TOKENS)
        plain = without_slo(request, request.model)
        found.append(msgspec.structs.replace(plain, slo_e2e_ms=scale * alone_s * 1000))
    return found


def cluster(models: Sequence[Model], gpus: int) -> dict[str, Any]:
    """Nodes of 8 GPUs. The other SLOs are out of reach: only the end-to-end one is judged."""
    return {
        "gpus": {"type": GPU, "count": gpus, "nodes": max(1, gpus // 8), "engines": 32},
        "models": [{"name": m.name, "shape": m.shape, "tp": DEGREES[m.shape]} for m in models],
        "slo": {"ttft": "60s", "tpot": "1s"},
        "patience": "60s",
    }


TUNING_RPS = 20.0
TUNING_ALPHA = 0.9


def tuned_systems(lab: Lab) -> Tuned:
    """For all studies that compare systems; of the most popular model TUNING_RPS."""
    there, models = elsewhere(lab), nineteen()
    most, seconds = lab.pick(TUNING_RPS, 1.0), lab.pick(40.0, 8.0)
    rate = most * sum((m.rank + 1) ** -TUNING_ALPHA for m in models)
    trace = power_law(there, models, rate, TUNING_ALPHA, seconds)
    config = lab.setup("tuning", cluster(models, 32), trace)
    load = (
        f"another trace of Figure 5's, {seconds:g} s, alpha {TUNING_ALPHA:g}, up to {most:g} req/s"
    )
    return tune(
        lab, [config], SYSTEMS, throughput, load=load, what="throughput weighted by rate (req/s)"
    )


def slo(found: Measured) -> float | None:
    """End-to-end attainment in percent."""
    return None if found.summary is None else 100 * found.attainment("e2e", "1")


def throughput(found: Measured) -> float | None:
    """Averaged over the models by rate (§4.1)."""
    return None if found.summary is None else found.weighted_rps


def point(found: Measured, **heads: Any) -> dict[str, Any]:
    return row(found, **heads)
