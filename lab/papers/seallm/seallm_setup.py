"""Setup of SeaLLM's evaluation (§6.1) at a quarter of its size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from lab.papers.study.a100 import GPU, slo, with_slos
from lab.papers.study.lab import Lab
from lab.papers.study.lines import Measure, Points
from lab.papers.study.trial import TrialOutcome
from lab.papers.study.tuning import ONE_POLICY, RULE, Systems, Tuned, simulated, tune, tuning_lab
from prism_replay.generators.steady import renewals
from prism_replay.lengths import SHAREGPT, Lengths, LengthSource, requests_at
from prism_replay.trace import Trace, TraceRequest

GPUS = 8
"""Number of A100s; the paper has A800s (§6.1), which are A100s with a slower NVLink."""
SLO_SCALE = 5.0
BURSTS_CV = 4.0
OUTPUT_MAX = 2048
CONTEXT = 8192
"""More than the models' 2048 and 4096 tokens: the paper does not say how it cut ShareGPT's."""

CHAT = replace(SHAREGPT, input_median=31, output_median=259)
"""ShareGPT's lengths with the means of SeaLLM's Table 1: 73 input tokens, 427 output."""
SUMMARIES = Lengths(
    input_median=3200,
    input_sigma=0.25,
    input_max=4000,
    output_median=19,
    output_sigma=0.5,
    output_max=96,
)
"""LongBench's lengths: mean output of 21 tokens; inputs (mean 13,187) cut to Llama-2's context."""


@dataclass(frozen=True)
class Service:
    name: str
    shape: str
    tp: int
    lengths: LengthSource


SERVICES = (
    Service("chat-7b", "Llama-2-7B", 1, CHAT),
    Service("summaries-7b", "Llama-2-7B", 1, SUMMARIES),
    Service("chat-13b", "Llama-2-13B", 1, CHAT),
    Service("chat-opt", "opt-6.7b", 1, CHAT),
    Service("chat-70b", "Llama-2-70B", 4, CHAT),
)
LARGEST = "chat-70b"
TUNING_RPS = 12.5
FIXED = "muxserve, fixed shares"
SYSTEMS = {
    "seallm": ("seallm", ""),
    "alpaserve": ("alpaserve", ""),
    "muxserve": ("muxserve", ""),
    FIXED: ("muxserve", "fixed-sm"),
    "vllm": ("dedicated", ""),
}
"""Name -> (policy, variant). With vLLM, each service is alone on its GPUs, which are divided by
`dedicated.search`. The paper divides them "evenly" (§6.1), which is not possible for a service of
70B on 8 GPUs. MuxServe is as in its own paper, where decodes take the remaining SMs (MuxServe
§3.4), and as an ablation with the "fixed percentage of computational resources for each LLM
service" of SeaLLM §6.2."""

FAST = {name: system for name, system in SYSTEMS.items() if name != "alpaserve"}
"""Systems with searches that are fast enough for tests."""

GIVEN_AHEAD = (
    " All systems know the rates, lengths and execution times of the whole trace. The searches of "
    "SeaLLM and AlpaServe simulate up to 600 of its requests unless tuned to another number, at "
    "low rates all of them; MuxServe's search uses means. SeaLLM's first replacement is after 5 "
    "minutes, longer than any trace, unless it is tuned or stated to be earlier."
)
FAIR = ONE_POLICY + GIVEN_AHEAD
FAIR_TUNED = RULE + GIVEN_AHEAD


@dataclass(frozen=True)
class ServiceLoad:
    rate_rps: float
    """Rate of all services together."""
    seconds: float
    skew: int = 1
    """Number of consecutive requests to one service."""
    spread: float = 0.0
    """Standard deviation of the output length, relative to the length."""
    slo_scale: float = SLO_SCALE
    """SLO relative to the execution time of the request on an idle engine."""
    slo_of_service: bool = False
    """True if the SLO is relative to the mean execution time of the service instead."""


def trace(lab: Lab, load: ServiceLoad) -> Trace:
    """Returns a trace of the load.

    Arrivals are those of Azure Functions if the user has the file, scaled to this rate. Otherwise
    they have Gamma gaps with AlpaServe's CV of 4, equally for all services.
    """
    rng = np.random.default_rng([lab.seed, 11])
    names = [s.name for s in SERVICES]
    given = None
    if load.skew == 1:
        given = lab.sources.functions(names, load.seconds, load.rate_rps, lab.seed)
    if given is not None:
        moments_s = np.array([r.arrival_s for r in given])
        owner = np.array([names.index(r.model) for r in given])
    elif load.skew > 1:
        moments_s = renewals(load.rate_rps, 1.0, load.seconds, rng)
        runs = -(-len(moments_s) // load.skew)
        owner = np.repeat(rng.integers(len(names), size=runs), load.skew)[: len(moments_s)]
    else:
        rate_rps = load.rate_rps / len(names)
        by_service = [renewals(rate_rps, BURSTS_CV, load.seconds, rng) for _ in names]
        moments_s = np.concatenate(by_service)
        owner = np.repeat(np.arange(len(names)), [len(each) for each in by_service])
    found: list[TraceRequest] = []
    for number, service in enumerate(SERVICES):
        found += requests_at(service.name, moments_s[owner == number], service.lengths, rng)
    spread = [_spread(request, load.spread, rng) for request in found]
    return with_slos(
        sorted(spread, key=lambda r: r.timestamp),
        {s.name: (s.shape, s.tp) for s in SERVICES},
        load.slo_scale,
        of_mean=load.slo_of_service,
    )


def _spread(request: TraceRequest, spread: float, rng: np.random.Generator) -> TraceRequest:
    """Adds a Gaussian delta to the output length, as in §6.3.

    Args:
        spread: Standard deviation relative to the output length.
    """
    if not spread:
        return request
    drawn = request.output_length * (1 + spread * float(rng.standard_normal()))
    return msgspec.structs.replace(request, output_length=int(np.clip(drawn, 1, OUTPUT_MAX)))


def cluster(gpus: int = GPUS) -> dict[str, Any]:
    """Returns a setup with one node. Only the E2E SLO counts; the others are loose."""
    return {
        "gpus": {"type": GPU, "count": gpus},
        "models": [
            {"name": s.name, "shape": s.shape, "tp": s.tp, "context_length": CONTEXT}
            for s in SERVICES
        ],
        "slo": {"ttft": "60s", "tpot": "1s"},
        "patience": "120s",
    }


def tuned_systems(lab: Lab) -> Tuned:
    """Returns the tuned systems for all studies that compare systems."""
    there = tuning_lab(lab)
    load = ServiceLoad(lab.pick(TUNING_RPS, 2.0), lab.pick(60.0, 5.0))
    config = lab.setup("tuning", cluster(), trace(there, load))
    description = (
        f"another such trace, {load.seconds:g} s at {load.rate_rps:g} req/s on {GPUS} GPUs"
    )
    chosen = lab.pick(SYSTEMS, FAST)
    return tune(lab, [config], chosen, slo, load=description, what="SLO attainment (%)")


def latency(found: TrialOutcome) -> float | None:
    """Returns the mean normalised latency (§6.1)."""
    return found.normalized_latency


def tail_s(found: TrialOutcome) -> float | None:
    """Returns the P99 of the E2E latency."""
    p99_ms = found.summary.total.e2e_ms.p99 if found.summary else None
    return None if p99_ms is None else p99_ms / 1000


def others_tail_s(found: TrialOutcome) -> float | None:
    """Returns the longest P99 E2E latency of the services other than LARGEST."""
    if found.summary is None:
        return None
    tails = (group.e2e_ms.p99 for name, group in found.summary.models.items() if name != LARGEST)
    return max((p99_ms / 1000 for p99_ms in tails if p99_ms is not None), default=None)


def mean_ttft_ms(found: TrialOutcome) -> float | None:
    return found.summary.total.ttft_ms.mean if found.summary else None


def mean_tpot_ms(found: TrialOutcome) -> float | None:
    return found.summary.total.tpot_ms.mean if found.summary else None


LATENCY: tuple[Measure, bool] = (latency, True)
ATTAINMENT: tuple[Measure, bool] = (slo, False)
"""(measure, whether smaller figures are better)."""


def seconds_for(lab: Lab) -> float:
    """Returns a duration at which bursty arrivals (CV 4) still have the given load."""
    return lab.pick(60.0, 5.0)


def under_loads(
    lab: Lab,
    tuned: Tuned,
    loads: Mapping[Any, ServiceLoad],
    gpus: Mapping[Any, int] | None = None,
    systems: Systems | None = None,
) -> Points:
    """Runs systems, by default all of the study, under each load."""
    setups = {
        x: lab.setup(
            f"x{x}".replace(".", "-"), cluster((gpus or {}).get(x, GPUS)), trace(lab, load)
        )
        for x, load in loads.items()
    }
    return simulated(lab, setups, systems or lab.pick(SYSTEMS, FAST), tuned)
