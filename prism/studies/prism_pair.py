"""Two models on one GPU: Prism's Figures 3, 8 and 11 (§3.2, §7.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from prism.replay.generate import Lengths, LengthSource, requests_at
from prism.replay.trace import Trace, TraceRequest
from prism.studies import findings
from prism.studies.findings import Findings, Plot
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
    lab: Lab, config: str, policies: Sequence[str], **changes: Any
) -> tuple[dict[str, Measured], list[str]]:
    """Policies that were simulated; and why others were not."""
    trials = [Trial(config, {**changes, "policy": p}, series=True) for p in policies]
    outcomes = lab.run(trials, "policies")
    found = {p: o for p, o in zip(policies, outcomes, strict=True) if o.series is not None}
    return found, problems(trials, outcomes)


# --- Figure 3 ------------------------------------------------------------------------------


def fig3(lab: Lab) -> Findings:
    """T1: both models fluctuate, the first has more; T2: the first is idle, the second spikes."""
    half_s = lab.pick(120.0, 10.0)
    fast = lab.pick(1.0, 0.1)
    phases = [(half_s, 48.0 * fast, 16.0 * fast), (half_s, 0.0, 90.0 * fast)]
    lengths = lab.sources.sharegpt()
    trace = phased(lab, phases, [lengths, lengths], wave=0.6)
    cluster = prepared(lab, "pair", PAIR, trace, ONE_GPU)
    policies = ("muxserve++", "static", "qlm", "prism")
    found, remarks = with_series(lab, cluster.config, policies, slo_scale=SLO_SCALE)
    kv = {p: _series(o) for p, o in found.items()}
    first = {p: mean_kv(s, 0, half_s) for p, s in kv.items()}
    then = {p: mean_kv(s, half_s, 2 * half_s) for p, s in kv.items()}
    source = "§3.2, Figure 3"
    drops = _drops(kv.get("qlm"), half_s)
    compared = [
        findings.order("T1: mean KV memory (GB)", first, ("muxserve++", "static"), source),
        findings.order(
            "T2: mean KV memory (GB), first model idle", then, ("qlm", "muxserve++"), source
        ),
        findings.claim(
            "T1: QLM's KV memory drops to nearly nothing as it swaps",
            None if drops is None else drops > 0,
            "-" if drops is None else f"{drops} times",
            "periodically",
            source,
        ),
        findings.factor(
            "T2: KV memory, Prism over MuxServe++",
            findings.ratio(then.get("prism"), then.get("muxserve++")),
            None,
            "§3.2, §4",
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


def _drops(series: Series | None, until_s: float) -> int | None:
    """How often KV memory falls below a tenth of its mean."""
    if series is None:
        return None
    held = [v or 0.0 for t, v in kv_line(series) if t < until_s]
    low = [v < 0.1 * sum(held) / len(held) for v in held]
    return sum(now and not before for before, now in pairwise(low))


# --- Figure 8 ------------------------------------------------------------------------------


def fig8(lab: Lab) -> Findings:
    """After 20 s the first model's demand falls and the second one's surges."""
    fast = lab.pick(1.0, 0.1)
    phases = [(20.0, 40.0 * fast, 12.0 * fast), (lab.pick(40.0, 10.0), 2.0 * fast, 90.0 * fast)]
    end_s = sum(seconds for seconds, _, _ in phases)
    lengths = lab.sources.sharegpt()
    trace = phased(lab, phases, [lengths, lengths])
    cluster = prepared(lab, "pair", PAIR, trace, ONE_GPU)
    found, remarks = with_series(lab, cluster.config, ("prism", "static"), slo_scale=SLO_SCALE)
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


# --- Figure 11 -----------------------------------------------------------------------------

KEPT = 90.0
LOCAL = {"with": "", "without": "no-local"}
LONG = Lengths(input_median=900, input_sigma=0.6, input_max=4000, output_median=150)
SHORT = Lengths(input_median=60, input_sigma=0.8, input_max=512, output_median=100)


def fig11(lab: Lab) -> Findings:
    """The first model's SLO scale is eight; the second's requests are shorter, its scale varies.
    The load is the highest tried at which the first model has 90 % with the scheduler, as the
    paper says of it."""
    seconds = lab.pick(60.0, 8.0)
    scales = lab.pick((2.0, 4.0, 8.0, 16.0), (4.0,))
    for rate in lab.pick((32.0, 28.0, 24.0, 20.0, 18.0, 16.0, 14.0, 13.0, 12.0, 10.0), (4.0,)):
        trace = phased(lab, [(seconds, rate, 1.5 * rate)], [LONG, SHORT], wave=0.8)
        cluster = prepared(lab, "pair", PAIR, trace, ONE_GPU)
        config = _rescaled(lab, cluster.config, trace, {"m0": 8.0, "m1": scales[0]})
        first = lab.run([Trial(config, {"policy": "prism"}, series=True)], f"rate {rate:g}")[0]
        if 100 * first.models["m0"].ttft > KEPT:
            break
    trials = [
        Trial(_rescaled(lab, cluster.config, trace, {"m0": 8.0, "m1": scale}), {}, variant=variant)
        for scale in scales
        for variant in LOCAL.values()
    ]
    trials = [Trial(t.config, {"policy": "prism"}, variant=t.variant, series=True) for t in trials]
    outcomes = iter(lab.run(trials, "with and without"))
    shares: dict[str, dict[str, list[tuple[Any, float | None]]]] = {
        model: {name: [] for name in LOCAL} for model in ("m0", "m1")
    }
    table: list[dict[str, Any]] = []
    queues: dict[str, list[tuple[Any, float | None]]] = {}
    for scale in scales:
        for name in LOCAL:
            found = next(outcomes)
            for model, lines in shares.items():
                lines[name].append((scale, 100 * found.models[model].ttft))
            series = _series(found)
            queues[name] = list(zip(series.time_s, series.waiting["m1"], strict=True))
            table.append(row(found, scheduler=name, slo_scale=scale, **_each(found)))
    gains = [
        (a or 0.0) - (b or 0.0)
        for (_, a), (_, b) in zip(shares["m1"]["with"], shares["m1"]["without"], strict=True)
    ]
    source = "§7.4, Figure 11"
    lowest = min(v for _, v in shares["m0"]["with"] if v is not None)
    compared = [
        findings.value(
            "second model's TTFT attainment gained, at most",
            max(gains),
            40.0,
            source,
            unit="points",
            within=0.5,
        ),
        findings.claim(
            "first model keeps a high attainment (above 90 %)",
            lowest > KEPT,
            f"{lowest:.1f} % at least",
            "consistently",
            source,
        ),
    ]
    plots = {
        "m1": Plot("Second model", "its SLO scale", "TTFT attainment (%)", shares["m1"]),
        "m0": Plot("First model", "SLO scale of the second", "TTFT attainment (%)", shares["m0"]),
        "queue": Plot("Second model's queue, last scale", "s", "requests", queues),
    }
    return Findings(compared, table, plots, [FAIR, cluster.described()])


def _each(found: Measured) -> dict[str, float]:
    return {f"ttft_{name}": 100 * model.ttft for name, model in found.models.items()}


def _rescaled(lab: Lab, config: str, trace: Trace, scales: Mapping[str, float]) -> str:
    """The setup with SLOs times a scale of each model's own."""
    data = lab.read(config)
    for model in data["models"]:
        model["slo"] = {
            key: f"{float(text.removesuffix('ms')) * scales[model['name']]:.3f}ms"
            for key, text in model["slo"].items()
        }
    return lab.setup(f"pair-{scales['m1']:g}", data, trace)


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
        "2 minutes of each pattern instead of 30",
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
    Study(
        "prism-fig11",
        "With and without the GPU-local scheduler",
        "Prism, Figure 11, §7.4",
        PRESSED + "; long prompts with SLO scale 8 beside short ones with a varied SLO scale",
        "60 s of trace",
        MADE + " Without it, requests start in the order of their arrival.",
        fig11,
    ),
)
