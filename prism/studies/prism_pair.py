"""Two models on one GPU: Prism's Figures 3, 8 and 11 (§3.2, §7.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from prism.replay.generate import LengthSource, requests_at
from prism.replay.trace import Trace, TraceRequest
from prism.studies import findings
from prism.studies.findings import Comparison, Findings, Plot
from prism.studies.lab import Lab
from prism.studies.prism_setup import FAIR, prepared, problems, row
from prism.studies.prism_sweeps import SLO_SCALES
from prism.studies.sources import without_slo
from prism.studies.study import Study
from prism.studies.trial import Measured, Series, Trial

GB = 1e9
SLO_SCALE = SLO_SCALES["arena-chat"]
PAIR = [("Llama-3.1-8B", 1), ("Llama-3.1-8B", 1)]
ONE_GPU: dict[str, Any] = {"gpus": {"type": "h100", "count": 1}}

Phase = tuple[float, float, float]
"""Seconds, and the requests per second of the first and the second model."""


def phased(
    lab: Lab, phases: Sequence[Phase], lengths: Sequence[LengthSource], wave: float = 0.0
) -> Trace:
    """Poisson arrivals of two models whose rates change from phase to phase and, by the part
    `wave`, up and down within a minute."""
    rng = np.random.default_rng([lab.seed, 13])
    found: list[TraceRequest] = []
    for model, source in enumerate(lengths):
        moments_s: list[float] = []
        start_s = 0.0
        for seconds, *rates in phases:
            highest = rates[model] * (1 + wave)
            drawn = np.sort(rng.uniform(0, seconds, rng.poisson(highest * seconds)))
            swing = 1 + wave * np.sin(2 * np.pi * (drawn / 60 + 0.5 * model))
            kept = drawn[rng.random(len(drawn)) * (1 + wave) < swing]
            moments_s += (start_s + kept).tolist()
            start_s += seconds
        requests = requests_at(f"m{model}", np.array(moments_s), source, rng)
        found += [without_slo(request, request.model) for request in requests]
    return sorted(found, key=lambda request: request.timestamp)


def mean_kv(series: Series, start_s: float, end_s: float) -> float:
    """Of both models, in GB."""
    held = [sum(values) for values in zip(*series.kv_bytes.values(), strict=True)]
    inside = [h for t, h in zip(series.time_s, held, strict=True) if start_s <= t < end_s]
    return sum(inside) / len(inside) / GB if inside else 0.0


def kv_line(series: Series) -> list[tuple[Any, float | None]]:
    held = zip(series.time_s, zip(*series.kv_bytes.values(), strict=True), strict=True)
    return [(t, sum(values) / GB) for t, values in held]


def tokens_rate(series: Series, start_s: float, end_s: float) -> float:
    pairs = zip(series.time_s, series.tokens, strict=True)
    inside = [v for t, v in pairs if start_s <= t < end_s]
    return sum(inside) / len(inside) if inside else 0.0


def with_series(
    lab: Lab, config: str, policies: Mapping[str, tuple[str, str]], **changes: Any
) -> tuple[dict[str, Measured], list[str]]:
    """name -> (policy, variant): those that were simulated; and why others were not."""
    trials = [
        Trial(config, {**changes, "policy": policy}, variant=variant, series=True)
        for policy, variant in policies.values()
    ]
    outcomes = lab.run(trials, "policies")
    found = {p: o for p, o in zip(policies, outcomes, strict=True) if o.series is not None}
    return found, problems(trials, outcomes)


# --- Figure 3 ------------------------------------------------------------------------------

BY_DEADLINE = "qlm, late queues by deadline"
FIG3 = {
    "muxserve++": ("muxserve++", ""),
    "static": ("static", ""),
    "qlm": ("qlm", ""),
    BY_DEADLINE: ("qlm", "by-deadline"),
    "prism": ("prism", ""),
}
"""name -> (policy, variant). QLM's published code orders a queue in which not all can be in time by
deadline; ours, by fewest late requests, which serves more in time and swaps less."""


def fig3(lab: Lab) -> Findings:
    """T1: both models fluctuate, the first has more; T2: the first is idle, the second spikes."""
    half_s, fast = lab.pick(120.0, 10.0), lab.pick(1.0, 0.1)
    end_s = 3 * half_s
    phases = [(half_s, 36.0 * fast, 12.0 * fast), (end_s - half_s, 0.0, 70.0 * fast)]
    lengths = lab.sources.sharegpt()
    trace = phased(lab, phases, [lengths, lengths], wave=0.6)
    cluster = prepared(lab, "pair", PAIR, trace, ONE_GPU)
    found, remarks = with_series(lab, cluster.config, FIG3, slo_scale=SLO_SCALE)
    kv = {p: _series(o) for p, o in found.items()}
    first = {p: mean_kv(s, 0, half_s) for p, s in kv.items()}
    then = {p: mean_kv(s, half_s, end_s) for p, s in kv.items()}
    source = "§3.2, Figure 3"
    drops, by_deadline = (_drops(kv.get(name), half_s) for name in ("qlm", BY_DEADLINE))
    compared = [
        findings.order("T1: mean KV memory (GB)", first, ("muxserve++", "static"), source),
        findings.order(
            "T2: mean KV memory (GB), first model idle",
            then,
            ("qlm", ("muxserve++", "static")),
            source,
        ),
        findings.claim(
            "T1: QLM's KV memory drops to nearly nothing as it swaps",
            None if drops is None else drops > 0,
            "-" if drops is None else f"{drops} times",
            "periodically",
            source,
        ),
        *by_deadline_drops(drops, by_deadline),
        findings.unsaid(
            "T2: KV memory, Prism over MuxServe++ (Prism is not in the figure)",
            findings.ratio(then.get("prism"), then.get("muxserve++")),
            "ours",
        ),
    ]
    plots = {"kv": Plot("KV memory", "s", "GB", {p: kv_line(s) for p, s in kv.items()})}
    table = [
        row(o, policy=p, kv_t1_gb=first[p], kv_t2_gb=then[p], load="T1, T2")
        for p, o in found.items()
    ]
    return Findings(compared, table, plots, [FAIR, cluster.described()], remarks)


def _series(found: Measured) -> Series:
    assert found.series is not None
    return found.series


def by_deadline_drops(drops: int | None, changed: int | None) -> list[Comparison]:
    """Only where QLM itself has no drops is there a cause to name."""
    if drops is None or changed is None or drops > 0:
        return []
    verdict = "names the cause" if changed else "is not the cause"
    what = f"ablation: T1: drops of {BY_DEADLINE}"
    return [Comparison(what, f"{changed} times", "not published", verdict, "ours")]


def _drops(series: Series | None, until_s: float) -> int | None:
    """How often KV memory falls below a tenth of its mean."""
    if series is None:
        return None
    held = [v or 0.0 for t, v in kv_line(series) if t < until_s]
    low = [v < 0.1 * sum(held) / len(held) for v in held]
    return sum(now and not before for before, now in pairwise(low))


# --- Figure 8 ------------------------------------------------------------------------------


FIG8 = {"prism": ("prism", ""), "static": ("static", "")}


def fig8(lab: Lab) -> Findings:
    """After 20 s the first model's demand falls and the second one's surges."""
    fast = lab.pick(1.0, 0.1)
    phases = [(20.0, 40.0 * fast, 12.0 * fast), (lab.pick(40.0, 10.0), 2.0 * fast, 90.0 * fast)]
    end_s = sum(seconds for seconds, _, _ in phases)
    lengths = lab.sources.sharegpt()
    trace = phased(lab, phases, [lengths, lengths])
    cluster = prepared(lab, "pair", PAIR, trace, ONE_GPU)
    found, remarks = with_series(lab, cluster.config, FIG8, slo_scale=SLO_SCALE)
    kv = {p: mean_kv(_series(o), 20.0, end_s) for p, o in found.items()}
    tokens = {p: tokens_rate(_series(o), 20.0, end_s) for p, o in found.items()}
    source = "§7.4, Figure 8"
    compared = [
        findings.factor(
            f"{what} after the surge, Prism over static partition",
            findings.ratio(values.get("prism"), values.get("static")),
            None,
            source,
        )
        for what, values in (("KV memory", kv), ("throughput", tokens))
    ]
    plots = {
        "kv": Plot("KV memory", "s", "GB", {p: kv_line(_series(o)) for p, o in found.items()}),
        "tokens": Plot(
            "Output tokens",
            "s",
            "tokens/s",
            {
                p: list(zip(_series(o).time_s, _series(o).tokens, strict=True))
                for p, o in found.items()
            },
        ),
    }
    table = [
        row(o, policy=p, kv_gb=kv[p], tokens_per_s=tokens[p], load="surge")
        for p, o in found.items()
    ]
    return Findings(compared, table, plots, [FAIR, cluster.described()], remarks)


PRESSED = "2 models of 8B on one H100-80G, at rates at which KV memory is what they compete for"
MADE = (
    "The workload is made after the figure's description: Poisson arrivals whose rates change as "
    "described, ShareGPT's mean lengths; the paper's own requests and memory are not published."
)
STUDIES = (
    Study(
        "prism-fig3",
        "KV memory of existing ways to share, in two load patterns",
        "Prism, Figure 3, §3.2",
        PRESSED,
        "2 minutes of T1 and 4 of T2 (an idle model is evicted after 45 s) instead of 30 each",
        MADE,
        fig3,
    ),
    Study(
        "prism-fig8",
        "Cross-model memory coordination against static partition",
        "Prism, Figure 8, §7.4",
        PRESSED,
        "60 s, as in the figure",
        MADE,
        fig8,
    ),
)
