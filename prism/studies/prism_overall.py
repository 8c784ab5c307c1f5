"""Prism's end-to-end results: Figure 7 (three rows) and Figure 12 (§7.3, §7.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prism.studies import findings
from prism.studies.findings import Comparison, Findings
from prism.studies.lab import Lab
from prism.studies.prism_setup import (
    FAIR,
    Cluster,
    attainment,
    eighteen,
    fifty_eight,
    model_names,
    prepared,
)
from prism.studies.prism_sweeps import (
    AT_TP,
    BASELINES,
    GIVEN,
    METRICS,
    SLO_SCALES,
    TARGET,
    Lines,
    eight,
    elsewhere,
    figure,
    held_rate,
    lines,
    mean,
    orders,
    rows,
    since,
    sweep,
    up_to,
)
from prism.studies.sources import STYLES
from prism.studies.study import Study
from prism.studies.trial import Measured, Trial

# --- Figure 7 ------------------------------------------------------------------------------


def by_rate(lab: Lab) -> Findings:
    rates = lab.pick((8.0, 16.0, 32.0, 48.0), (4.0, 16.0))
    published = {"hyperbolic": {"muxserve++": 2.3, "static": 3.5}, "arena-chat": {}}
    compared, table, plots, remarks, budget = [], [], {}, [], [FAIR]
    for style in STYLES:
        cluster = eight(lab, style)
        fixed = {"slo_scale": SLO_SCALES[style]}
        by_policy, lost = sweep(lab, cluster, "rate_scale", rates, fixed)
        remarks += [reason for reason in lost if reason not in remarks]
        budget.append(f"{style}: {cluster.described()}")
        table += rows(style, "rate_scale", by_policy)
        for metric in METRICS:
            found = lines(by_policy, metric)
            title = f"{metric.upper()} by rate, {style}"
            plots[f"{style}-{metric}"] = figure(title, "rate scale", found, metric)
            shares = {policy: mean(points) for policy, points in found.items()}
            what = f"{style}: mean {metric.upper()} attainment over the rates"
            compared += orders(what, shares, "Figure 7, first row")
            points = [{**fixed, "rate_scale": rate} for rate in rates]
            compared += elsewhere(lab, style, points, shares, metric)
        compared += _more_requests(style, lines(by_policy, "ttft"), published[style])
    return Findings(compared, table, plots, budget, remarks)


def _more_requests(style: str, found: Lines, published: Mapping[str, float]) -> list[Comparison]:
    held = {policy: up_to(points) for policy, points in found.items()}
    over = {name: findings.ratio(held.get("prism"), most) for name, most in held.items()}
    what = f"{style}: requests at 99 % TTFT, Prism over"
    source = "§7.3, Figure 7, first row (factors: OSDI 2026 version)"
    compared = [
        findings.factor(f"{what} {system}", over[system], published.get(named), source)
        for system, named in (("muxserve++", "muxserve++"), (GIVEN, "muxserve++"), ("static",) * 2)
        if system in over
    ]
    if GIVEN in over and compared[0].agrees is False:
        caused = findings.cause(f"{what} {AT_TP}", over["muxserve++"], over[GIVEN])
        compared.insert(1, caused)
    return compared


AT_99 = {
    ("hyperbolic", "ttft"): 20.0,
    ("hyperbolic", "tpot"): 22.0,
    ("arena-chat", "ttft"): 10.0,
    ("arena-chat", "tpot"): 3.0,
}
BEST_BASELINE = {"hyperbolic": 84.79, "arena-chat": 67.22}


def by_slo(lab: Lab) -> Findings:
    scales = lab.pick((5.0, 10.0, 20.0), (5.0, 20.0))
    compared, table, plots, remarks, budget = [], [], {}, [], [FAIR]
    for style in STYLES:
        cluster = eight(lab, style)
        load = held_rate(lab, cluster, {"slo_scale": SLO_SCALES[style]})
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
        last = {policy: points[-1][1] for policy, points in lines(by_policy, "ttft").items()}
        compared += _largest_scale(style, last)
        point = {"slo_scale": scales[-1], "rate_scale": load}
        compared += elsewhere(lab, style, [point], last)
    return Findings(compared, table, plots, budget, remarks)


def _largest_scale(style: str, last: Mapping[str, float | None]) -> list[Comparison]:
    source = "§7.3, Figure 7, middle row"
    compared = [
        findings.value(
            f"{style}: TTFT attainment at the largest scale, {system}, the paper's best baseline",
            last[system],
            BEST_BASELINE[style],
            source,
            unit="%",
        )
        for system in ("muxserve++", GIVEN)
        if system in last
    ]
    return [*compared, *orders(f"{style}: TTFT attainment at the largest scale", last, source)]


PRISM_GPUS = {"hyperbolic": 4, "arena-chat": 5}


def by_gpus(lab: Lab) -> Findings:
    counts = lab.pick((2, 4, 5, 8), (4, 5))
    compared, table, plots, remarks, budget = [], [], {}, [], [FAIR]
    for style in STYLES:
        trace = lab.sources.styled(style, model_names(18), lab.pick(600.0, 20.0), lab.seed)
        cluster = prepared(lab, f"eighteen-{style}", eighteen(), trace)
        fixed = {"slo_scale": SLO_SCALES[style]}
        enough = {**fixed, "gpus.count": lab.pick(PRISM_GPUS[style], 4)}
        load = fixed["rate_scale"] = held_rate(lab, cluster, enough)
        by_policy, lost = sweep(lab, cluster, "gpus.count", counts, fixed)
        remarks += [reason for reason in lost if reason not in remarks]
        budget.append(f"{style}, rate scale {load:g}: {cluster.described()}")
        table += rows(style, "gpus", by_policy)
        for metric in METRICS:
            found = lines(by_policy, metric)
            title = f"{metric.upper()} by GPUs, {style}"
            plots[f"{style}-{metric}"] = figure(title, "GPUs", found, metric)
        compared += _fewest(style, by_policy, counts[-1])
        given = lines(by_policy, "ttft").get(GIVEN, [])
        if since(given) is not None:
            most = {**fixed, "gpus.count": counts[-1]}
            compared += _by_equal_rates(lab, cluster, style, most, given[-1][1])
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
    found += orders(what, shares, source)
    held = sorted(p for p in BASELINES if p in ttft and since(ttft[p]) is not None)
    what = f"{style}: no baseline has 99 % TTFT with {most} GPUs"
    shown = ", ".join(held) + (" do" if len(held) > 1 else " does") if held else "none does"
    found.append(findings.claim(what, not held, shown, "none does", source))
    return found


def _by_equal_rates(
    lab: Lab, cluster: Cluster, style: str, fixed: Mapping[str, Any], here: float | None
) -> list[Comparison]:
    """Whether MuxServe++ gets there by knowing who will ask."""
    trials = [Trial(cluster.config, {**fixed, "policy": "muxserve++"}, variant="given-blind")]
    (share,) = [attainment(outcome, "ttft") for outcome in lab.run(trials, "equal rates")]
    if share is None or here is None:
        return []
    verdict = "is not the cause" if share >= TARGET else "names a cause"
    what = f"ablation: {style}: {GIVEN} by equal rates, with {fixed['gpus.count']} GPUs"
    shown = f"{here:.1f} %, changed {share:.1f} %"
    return [Comparison(what, shown, "not published", verdict, "ours")]


# --- Figure 12 -----------------------------------------------------------------------------


LARGE_RATES = (4.0, 8.0, 16.0, 24.0)


def large(lab: Lab) -> Findings:
    style = "arena-chat"
    counts = lab.pick((12, 16, 32), (32,))
    trace = lab.sources.styled(style, model_names(58), lab.pick(300.0, 100.0), lab.seed)
    nodes = {"gpus": {"type": "h100", "count": 32, "nodes": 1}}
    cluster = prepared(lab, "fifty-eight", fifty_eight(), trace, nodes)
    fixed = {"slo_scale": 5.0}
    enough = {**fixed, "gpus.count": lab.pick(16, 32)}
    load = held_rate(lab, cluster, enough, lab.pick(LARGE_RATES, (0.4,)))
    fixed["rate_scale"] = load
    by_policy, remarks = sweep(lab, cluster, "gpus.count", counts, fixed)
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
        compared += orders(what, shares, source)
    ttft = lines(by_policy, "ttft")
    needed = {policy: since(points) for policy, points in ttft.items()}
    for policy, said in (("prism", 16), ("muxserve++", 32), (GIVEN, 32)):
        if policy not in needed:
            continue
        what = f"GPUs for 99 % TTFT at SLO scale 5, {policy}"
        compared.append(
            findings.reached(
                what, needed[policy], said, source, unit="GPUs", most=counts[-1], within=0.3
            )
        )
    saved = findings.ratio(needed.get("muxserve++"), needed.get("prism"))
    compared.append(findings.factor("GPUs, MuxServe++ over Prism", saved, 2.0, source))
    budget = [FAIR, f"rate scale {load:g}: {cluster.described()}"]
    return Findings(compared, table, plots, budget, remarks)


DATA = (
    "The paper's traces are not public: the Hyperbolic style is the bursty generator with its "
    "published statistics and ShareGPT's mean lengths, the Arena style the Chatbot Arena sample "
    "that the prototype replays, or the generator with that sample's lengths. The paper states "
    "no rates: where one is needed it is the highest tried at which Prism itself holds 99 % TTFT "
    "where the paper says that it does. A load is so chosen by Prism's own attainment: that it "
    "holds it says nothing, and other loads would show other distances. SLO scales are 20 and 10, "
    "at which its Figure 7 has Prism at 99 % on the two traces, unless varied. MuxServe++ is shown "
    "twice: as its own search places models, which may spread a small one over several GPUs by "
    "tensor parallelism and so pools their memory and compute, and at the TP degrees that the "
    "paper's setup gives models."
)
EIGHT = "8 models of 1B to 8B on 2 H100-80G, SLOs over P95 latencies on dedicated GPUs"
STUDIES = (
    Study(
        "prism-fig7-rate",
        "SLO attainment by request rate",
        "Prism, Figure 7 (first row), §7.3",
        EIGHT + ", rate scales 8 to 48, both trace styles",
        "15 minutes of trace, four rates",
        DATA,
        by_rate,
    ),
    Study(
        "prism-fig7-slo",
        "SLO attainment by SLO scale",
        "Prism, Figure 7 (middle row), §7.3",
        "8 models of 1B to 8B on 2 H100-80G, both trace styles",
        "15 minutes of trace, three scales; TTFT and TPOT are scaled together",
        DATA + " The scales at which Prism has 99 % and the attainments of the best baseline are "
        "figures of this load, of three scales and of SLOs that count from our dedicated GPUs.",
        by_slo,
    ),
    Study(
        "prism-fig7-gpus",
        "SLO attainment by available GPUs",
        "Prism, Figure 7 (last row), §7.3",
        "18 models of 1B to 8B on 2 to 8 H100-80G, both trace styles",
        "10 minutes of trace, four cluster sizes",
        DATA + " Why baselines are at 99 % with eight GPUs is open: neither loads, traces, bursts, "
        "lengths, memory nor other placements that were tried turn it (decision 170). With eight "
        "GPUs Prism itself carries hardly more load than MuxServe++ at the given TP degrees.",
        by_gpus,
    ),
    Study(
        "prism-fig12",
        "58 models of 1B to 70B on up to 32 GPUs",
        "Prism, Figure 12, §7.5",
        "58 models (Table 4; 32B at TP 4, 70B at TP 4 and 8) on 12 to 32 H100-80G, SLO scale 5",
        "5 minutes of trace, one trace style, one SLO scale; GPUs count as one node, so that "
        "every number of them can hold a group of 8",
        DATA,
        large,
    ),
)
