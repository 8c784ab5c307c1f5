"""What SeaLLM's evaluation runs on (§6.1), at a quarter of its size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from lab.papers.a100 import GPU, slo, with_slos
from lab.papers.lab import Lab
from lab.papers.lines import Measure, Points
from lab.papers.trial import TrialOutcome
from lab.papers.tuning import RULE, Systems, Tuned, elsewhere, simulated, tune
from prism_replay.generators.steady import renewals
from prism_replay.lengths import SHAREGPT, Lengths, LengthSource, requests_at
from prism_replay.trace import Trace, TraceRequest

GPUS = 8
"""A100s; the paper's are A800s (§6.1), A100s with a slower NVLink."""
SLO_SCALE = 5.0
BURSTS_CV = 4.0
OUTPUT_MAX = 2048

CHAT = replace(SHAREGPT, input_median=31, output_median=259)
"""ShareGPT's means in SeaLLM's Table 1: 73 tokens in, 427 out."""
SUMMARIES = Lengths(
    input_median=3200,
    input_sigma=0.25,
    input_max=4000,
    output_median=19,
    output_sigma=0.5,
    output_max=96,
)
"""LongBench's mean of 21 tokens out; inputs, 13,187 on average, cut to what Llama-2 takes."""


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
"""name -> (policy, variant); vLLM is each service alone on its GPUs: "evenly" in the paper
(§6.1), which 8 GPUs do not allow with a service of 70B; here as `dedicated.search` has it. MuxServe
once as its own paper has it, where decodes take what is left of the SMs (MuxServe §3.4), and as an
ablation with the "fixed percentage of computational resources for each LLM service" of SeaLLM
§6.2."""

FAST = {name: system for name, system in SYSTEMS.items() if name != "alpaserve"}
"""Those whose searches are quick enough for tests."""

GIVEN_AHEAD = (
    " All systems are given the whole trace's rates, lengths and execution times; the searches of "
    "SeaLLM and AlpaServe simulate on up to 600 of its requests unless they are tuned to others, "
    "at low rates on all of them, while MuxServe's sees means. SeaLLM's first replacement comes "
    "after 5 minutes, which no trace lasts, unless it is tuned or said to come earlier."
)
FAIR = "Parts of one policy are compared: it runs with the shipped settings." + GIVEN_AHEAD
FAIR_TUNED = RULE + "." + GIVEN_AHEAD


@dataclass(frozen=True)
class ServiceLoad:
    rate_rps: float
    """Of all services."""
    seconds: float
    skew: int = 1
    """So many requests in a row are of one service."""
    spread: float = 0.0
    """Standard deviation of the output length, in lengths."""
    slo_scale: float = SLO_SCALE
    """Times the execution time of the request alone."""
    slo_of_service: bool = False
    """SLOs scale the service's mean execution time instead."""


def trace(lab: Lab, load: ServiceLoad) -> Trace:
    """Azure Functions at this rate where the user has them, else arrivals as bursty as AlpaServe
    takes them to be (Gamma gaps, CV 4), in equal parts to the services."""
    rng = np.random.default_rng([lab.seed, 11])
    names = [s.name for s in SERVICES]
    given = None
    if load.skew == 1:
        given = lab.sources.functions(names, load.seconds, load.rate_rps, lab.seed)
    if given is not None:
        moments_s = np.array([r.arrival_s for r in given])
        whose = np.array([names.index(r.model) for r in given])
    elif load.skew > 1:
        moments_s = renewals(load.rate_rps, 1.0, load.seconds, rng)
        runs = -(-len(moments_s) // load.skew)
        whose = np.repeat(rng.integers(len(names), size=runs), load.skew)[: len(moments_s)]
    else:
        rate_rps = load.rate_rps / len(names)
        parts = [renewals(rate_rps, BURSTS_CV, load.seconds, rng) for _ in names]
        moments_s = np.concatenate(parts)
        whose = np.repeat(np.arange(len(names)), [len(p) for p in parts])
    found: list[TraceRequest] = []
    for number, service in enumerate(SERVICES):
        found += requests_at(service.name, moments_s[whose == number], service.lengths, rng)
    spread = [_spread(request, load.spread, rng) for request in found]
    return with_slos(
        sorted(spread, key=lambda r: r.timestamp),
        {s.name: (s.shape, s.tp) for s in SERVICES},
        load.slo_scale,
        of_mean=load.slo_of_service,
    )


def _spread(request: TraceRequest, spread: float, rng: np.random.Generator) -> TraceRequest:
    """§6.3: a Gaussian delta, with a standard deviation of so many output lengths."""
    if not spread:
        return request
    drawn = request.output_length * (1 + spread * float(rng.standard_normal()))
    return msgspec.structs.replace(request, output_length=int(np.clip(drawn, 1, OUTPUT_MAX)))


def cluster(gpus: int = GPUS) -> dict[str, Any]:
    """One node; only the end-to-end SLO is judged."""
    return {
        "gpus": {"type": GPU, "count": gpus},
        "models": [{"name": s.name, "shape": s.shape, "tp": s.tp} for s in SERVICES],
        "slo": {"ttft": "60s", "tpot": "1s"},
        "patience": "120s",
    }


def tuned_systems(lab: Lab) -> Tuned:
    """For all studies that compare systems."""
    there = elsewhere(lab)
    load = ServiceLoad(lab.pick(TUNING_RPS, 2.0), lab.pick(60.0, 5.0))
    config = lab.setup("tuning", cluster(), trace(there, load))
    said = f"another such trace, {load.seconds:g} s at {load.rate_rps:g} req/s on {GPUS} GPUs"
    chosen = lab.pick(SYSTEMS, FAST)
    return tune(lab, [config], chosen, slo, load=said, what="SLO attainment (%)")


def latency(found: TrialOutcome) -> float | None:
    """Mean normalised latency (§6.1)."""
    return found.normalized_latency


def tail_s(found: TrialOutcome) -> float | None:
    """P99 of the end-to-end latency."""
    p99_ms = found.summary.total.e2e_ms.p99 if found.summary else None
    return None if p99_ms is None else p99_ms / 1000


def others_tail_s(found: TrialOutcome) -> float | None:
    """The longest P99 of the services other than LARGEST."""
    if found.summary is None:
        return None
    parts = (group.e2e_ms.p99 for name, group in found.summary.models.items() if name != LARGEST)
    return max((p99_ms / 1000 for p99_ms in parts if p99_ms is not None), default=None)


def mean_ttft_ms(found: TrialOutcome) -> float | None:
    return found.summary.total.ttft_ms.mean if found.summary else None


def mean_tpot_ms(found: TrialOutcome) -> float | None:
    return found.summary.total.tpot_ms.mean if found.summary else None


LATENCY: tuple[Measure, bool] = (latency, True)
ATTAINMENT: tuple[Measure, bool] = (slo, False)
"""A measure, and whether smaller figures are better."""


def seconds_for(lab: Lab) -> float:
    """Arrivals come in bursts (CV 4): in half a minute they are another load each time."""
    return lab.pick(60.0, 5.0)


def under_loads(
    lab: Lab,
    tuned: Tuned,
    loads: Mapping[Any, ServiceLoad],
    gpus: Mapping[Any, int] | None = None,
    systems: Systems | None = None,
) -> Points:
    """Systems (by default all of the study) under each load."""
    setups = {
        x: lab.setup(
            f"x{x}".replace(".", "-"), cluster((gpus or {}).get(x, GPUS)), trace(lab, load)
        )
        for x, load in loads.items()
    }
    return simulated(lab, setups, systems or lab.pick(SYSTEMS, FAST), tuned)
