"""Prism's end-to-end results: Table 1, Figure 7 (three rows), Figure 12 (§7.3, §7.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prism.studies import findings
from prism.studies.findings import Comparison, Findings, Plot
from prism.studies.lab import Lab
from prism.studies.prism_setup import (
    E2E_MODELS,
    FAIR,
    POLICIES,
    Cluster,
    attainment,
    eighteen,
    fifty_eight,
    model_names,
    prepared,
    problems,
    row,
)
from prism.studies.sources import STYLES
from prism.studies.study import Study
from prism.studies.trial import Measured, Trial

TARGET = 99.0
SLO_SCALE = 10.0
Lines = dict[str, list[tuple[Any, float | None]]]
METRICS = ("ttft", "tpot")
BEST_FIRST = ("prism", "muxserve++", "static", "qlm")
BASELINES = tuple(p for p in POLICIES if p != "prism")
LOADS = {"hyperbolic": 64.0, "arena-chat": 64.0}
"""Rate scales at which two GPUs are loaded so that SLOs start to be missed; the paper's are not
published."""


def eight(lab: Lab, style: str) -> Cluster:
    """Eight models of 1B to 8B (§7.3)."""
    seconds = lab.pick(120.0, 20.0)
    trace = lab.sources.styled(style, model_names(len(E2E_MODELS)), seconds, lab.seed)
    return prepared(lab, f"eight-{style}", [(name, 1) for name in E2E_MODELS], trace)


def sweep(
    lab: Lab, cluster: Cluster, key: str, values: Sequence[Any], fixed: Mapping[str, Any]
) -> tuple[dict[str, list[tuple[Any, Measured]]], list[str]]:
    """policy -> (value, outcome) over one key; and why points were not simulated."""
    trials = [
        Trial(cluster.config, {"slo_scale": SLO_SCALE, **fixed, "policy": policy, key: value})
        for policy in lab.pick(POLICIES, POLICIES[:3])
        for value in values
    ]
    outcomes = lab.run(trials, key)
    found: dict[str, list[tuple[Any, Measured]]] = {}
    for trial, outcome in zip(trials, outcomes, strict=True):
        found.setdefault(trial.changes["policy"], []).append((trial.changes[key], outcome))
    return found, problems(trials, outcomes)


def lines(found: Mapping[str, Sequence[tuple[Any, Measured]]], metric: str) -> Lines:
    """Attainment in percent; policies that were not simulated are left out."""
    return {
        policy: [(value, attainment(outcome, metric)) for value, outcome in points]
        for policy, points in found.items()
        if any(outcome.summary for _, outcome in points)
    }


def rows(style: str, key: str, found: Mapping[str, Sequence[tuple[Any, Measured]]]) -> list[Any]:
    return [
        row(outcome, style=style, policy=policy, **{key: value})
        for policy, points in found.items()
        for value, outcome in points
    ]


def up_to(points: Sequence[tuple[Any, float | None]], target: float = TARGET) -> float | None:
    """The largest x to which a falling line stays at the target, between points by interpolation;
    the last x where it never falls below, None where it starts below."""
    held: tuple[float, float] | None = None
    for x, y in points:
        if y is None:
            return None
        if y < target:
            if held is None:
                return None
            x0, y0 = held
            return float(x0 + (x - x0) * (y0 - target) / (y0 - y)) if y0 > y else x0
        held = (float(x), y)
    return held[0] if held else None


def since(points: Sequence[tuple[Any, float | None]], target: float = TARGET) -> float | None:
    """The smallest x at which a rising line is at the target; None where it never is."""
    return next((float(x) for x, y in points if y is not None and y >= target), None)


def mean(points: Sequence[tuple[Any, float | None]]) -> float | None:
    values = [y for _, y in points if y is not None]
    return sum(values) / len(values) if values else None


def figure(title: str, xlabel: str, found: Lines, metric: str) -> Plot:
    return Plot(title, xlabel, f"{metric.upper()} attainment (%)", found)


# --- Figure 7 ------------------------------------------------------------------------------


def by_rate(lab: Lab) -> Findings:
    rates = lab.pick((16.0, 32.0, 48.0, 64.0, 96.0), (4.0, 16.0))
    published = {"hyperbolic": {"muxserve++": 2.3, "static": 3.5}, "arena-chat": {}}
    compared, table, plots, remarks, budget = [], [], {}, [], [FAIR]
    for style in STYLES:
        cluster = eight(lab, style)
        by_policy, lost = sweep(lab, cluster, "rate_scale", rates, {})
        remarks += [reason for reason in lost if reason not in remarks]
        budget.append(f"{style}: {cluster.described()}")
        table += rows(style, "rate_scale", by_policy)
        for metric in METRICS:
            found = lines(by_policy, metric)
            title = f"{metric.upper()} by rate, {style}"
            plots[f"{style}-{metric}"] = figure(title, "rate scale", found, metric)
            shares = {policy: mean(points) for policy, points in found.items()}
            what = f"{style}: mean {metric.upper()} attainment over the rates"
            compared.append(findings.order(what, shares, BEST_FIRST, "Figure 7, first row"))
        compared += _more_requests(style, lines(by_policy, "ttft"), published[style])
    return Findings(compared, table, plots, budget, remarks)


def _more_requests(style: str, found: Lines, published: Mapping[str, float]) -> list[Comparison]:
    held = {policy: up_to(points) for policy, points in found.items()}
    return [
        findings.factor(
            f"{style}: requests at 99 % TTFT, Prism over {policy}",
            findings.ratio(held.get("prism"), held.get(policy)),
            published.get(policy),
            "§7.3, Figure 7, first row (factors: OSDI 2026 version)",
        )
        for policy in ("muxserve++", "static")
    ]


AT_99 = {
    ("hyperbolic", "ttft"): 20.0,
    ("hyperbolic", "tpot"): 22.0,
    ("arena-chat", "ttft"): 10.0,
    ("arena-chat", "tpot"): 3.0,
}
BEST_BASELINE = {"hyperbolic": 84.79, "arena-chat": 67.22}


def by_slo(lab: Lab) -> Findings:
    scales = lab.pick((3.0, 10.0, 20.0, 30.0), (5.0, 20.0))
    compared, table, plots, remarks, budget = [], [], {}, [], [FAIR]
    for style in STYLES:
        cluster = eight(lab, style)
        load = lab.pick(LOADS[style], 8.0)
        by_policy, lost = sweep(lab, cluster, "slo_scale", scales, {"rate_scale": load})
        remarks += [reason for reason in lost if reason not in remarks]
        budget.append(f"{style}, rate scale {load:g}: {cluster.described()}")
        table += rows(style, "slo_scale", by_policy)
        for metric in METRICS:
            found = lines(by_policy, metric)
            title = f"{metric.upper()} by SLO scale, {style}"
            plots[f"{style}-{metric}"] = figure(title, "SLO scale", found, metric)
            what = f"{style}: SLO scale at which Prism has 99 % {metric.upper()}"
            first, said = since(found.get("prism", [])), AT_99[style, metric]
            source = "§7.3, Figure 7, middle row"
            compared.append(
                findings.reached(what, first, said, source, unit="", most=scales[-1], within=0.5)
            )
        compared += _largest_scale(style, lines(by_policy, "ttft"))
    return Findings(compared, table, plots, budget, remarks)


def _largest_scale(style: str, found: Lines) -> list[Comparison]:
    last = {policy: points[-1][1] for policy, points in found.items()}
    known = [share for p in BASELINES if (share := last.get(p)) is not None]
    best = max(known, default=None)
    what = f"{style}: best baseline's TTFT attainment at the largest scale"
    source = "§7.3, Figure 7, middle row"
    return [
        findings.value(what, best, BEST_BASELINE[style], source, unit="%"),
        findings.order(
            f"{style}: TTFT attainment at the largest scale", last, BEST_FIRST[:2], source
        ),
    ]


PRISM_GPUS = {"hyperbolic": 4, "arena-chat": 5}


def by_gpus(lab: Lab) -> Findings:
    counts = lab.pick((2, 3, 4, 5, 8), (4, 5))
    compared, table, plots, remarks, budget = [], [], {}, [], [FAIR]
    for style in STYLES:
        seconds, load = lab.pick((120.0, 32.0), (20.0, 2.0))
        trace = lab.sources.styled(style, model_names(18), seconds, lab.seed)
        cluster = prepared(lab, f"eighteen-{style}", eighteen(), trace)
        by_policy, lost = sweep(lab, cluster, "gpus.count", counts, {"rate_scale": load})
        remarks += [reason for reason in lost if reason not in remarks]
        budget.append(f"{style}, rate scale {load:g}: {cluster.described()}")
        table += rows(style, "gpus", by_policy)
        for metric in METRICS:
            found = lines(by_policy, metric)
            title = f"{metric.upper()} by GPUs, {style}"
            plots[f"{style}-{metric}"] = figure(title, "GPUs", found, metric)
        compared += _fewest(style, by_policy, counts[-1])
    return Findings(compared, table, plots, budget, remarks)


def _fewest(
    style: str, by_policy: Mapping[str, Sequence[tuple[Any, Measured]]], most: int
) -> list[Comparison]:
    source = "§7.3, Figure 7, last row"
    ttft, tpot = lines(by_policy, "ttft"), lines(by_policy, "tpot")
    both = {
        policy: [
            (x, None if a is None or b is None else min(a, b))
            for (x, a), (_, b) in zip(ttft[policy], tpot[policy], strict=True)
        ]
        for policy in ttft
    }
    said = PRISM_GPUS[style]
    what = f"{style}: GPUs for 99 % TTFT and TPOT, Prism"
    needed = since(both.get("prism", []))
    found = [findings.reached(what, needed, said, source, unit="GPUs", most=most)]
    shares = {policy: mean(points) for policy, points in ttft.items()}
    what = f"{style}: mean TTFT attainment over the GPUs"
    found.append(findings.order(what, shares, BEST_FIRST, source))
    held = sorted(p for p in BASELINES if p in ttft and since(ttft[p]) is not None)
    what = f"{style}: no baseline has 99 % TTFT with {most} GPUs"
    shown = ", ".join(held) + (" do" if len(held) > 1 else " does") if held else "none does"
    found.append(findings.claim(what, not held, shown, "none does", source))
    return found


# --- Figure 12 -----------------------------------------------------------------------------


def large(lab: Lab) -> Findings:
    style = "arena-chat"
    seconds, load = lab.pick((120.0, 32.0), (100.0, 0.4))
    counts = lab.pick((12, 16, 24, 32), (24, 32))
    trace = lab.sources.styled(style, model_names(58), seconds, lab.seed)
    nodes = {"gpus": {"type": "h100", "count": 32, "nodes": 1}}
    cluster = prepared(lab, "fifty-eight", fifty_eight(), trace, nodes)
    by_policy, remarks = sweep(
        lab, cluster, "gpus.count", counts, {"rate_scale": load, "slo_scale": 5.0}
    )
    table = rows(style, "gpus", by_policy)
    source = "§7.5, Figure 12"
    compared: list[Comparison] = []
    plots = {}
    for metric in METRICS:
        found = lines(by_policy, metric)
        title = f"{metric.upper()} of 58 models by GPUs"
        plots[metric] = figure(title, "GPUs", found, metric)
        shares = {policy: mean(points) for policy, points in found.items()}
        what = f"mean {metric.upper()} attainment over the GPUs"
        compared.append(findings.order(what, shares, BEST_FIRST, source))
    ttft = lines(by_policy, "ttft")
    needed = {policy: since(points) for policy, points in ttft.items()}
    for policy, said in (("prism", 16), ("muxserve++", 32)):
        what = f"GPUs for 99 % TTFT at SLO scale 5, {policy}"
        compared.append(
            findings.reached(
                what, needed[policy], said, source, unit="GPUs", most=counts[-1], within=0.3
            )
        )
    saved = findings.ratio(needed.get("muxserve++"), needed.get("prism"))
    compared.append(findings.factor("GPUs, MuxServe++ over Prism", saved, 2.0, source))
    return Findings(compared, table, plots, [FAIR, cluster.described()], remarks)


DATA = (
    "The paper's traces are not public: the Hyperbolic style is the bursty generator with its "
    "published statistics and ShareGPT's mean lengths, the Arena style the Chatbot Arena sample "
    "that the prototype replays, or the generator with that sample's lengths. The rates and the "
    "SLO scale of the paper's rows are not stated; loads are such that SLOs start to be missed."
)
EIGHT = "8 models of 1B to 8B on 2 H100-80G, SLO scale 10 over P95 latencies on dedicated GPUs"
STUDIES = (
    Study(
        "prism-fig7-rate",
        "SLO attainment by request rate",
        "Prism, Figure 7 (first row), §7.3",
        EIGHT + ", rate scales 16 to 96, both trace styles",
        "120 s of trace, five rates",
        DATA,
        by_rate,
    ),
    Study(
        "prism-fig7-slo",
        "SLO attainment by SLO scale",
        "Prism, Figure 7 (middle row), §7.3",
        "8 models of 1B to 8B on 2 H100-80G at rate scale 64, both trace styles",
        "120 s of trace, four scales; TTFT and TPOT are scaled together",
        DATA,
        by_slo,
    ),
    Study(
        "prism-fig7-gpus",
        "SLO attainment by available GPUs",
        "Prism, Figure 7 (last row), §7.3",
        "18 models of 1B to 8B on 2 to 8 H100-80G, SLO scale 10, rate scale 32, both trace styles",
        "120 s of trace, five cluster sizes",
        DATA,
        by_gpus,
    ),
    Study(
        "prism-fig12",
        "58 models of 1B to 70B on up to 32 GPUs",
        "Prism, Figure 12, §7.5",
        "58 models (Table 4; 32B at TP 4, 70B at TP 4 and 8) on 12 to 32 H100-80G, SLO scale 5",
        "120 s of trace, one trace style, one SLO scale; GPUs count as one node, so that every "
        "number of them can hold a group of 8",
        DATA,
        large,
    ),
)
