"""Prism's Figure 7, first row: SLO attainment by rate (§7.3), and changes of the setup, not the
paper's, that may turn what does not hold here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from prism.studies import findings
from prism.studies.findings import Comparison, Findings
from prism.studies.lab import Lab
from prism.studies.prism_setup import FAIR_TUNED, Cluster, attainment
from prism.studies.prism_sweeps import (
    AS_FAST,
    AT_TP,
    BASELINES,
    GIVEN,
    METRICS,
    OSDI,
    PRISM_FIRST,
    SLO_SCALES,
    TIGHT,
    Levels,
    Lines,
    at,
    eight,
    figure,
    lines,
    mean,
    orders,
    rows,
    sweep,
    up_to,
)
from prism.studies.sources import STYLES
from prism.studies.tuning import whole_mean

MORE_REQUESTS: dict[str, dict[str, float]] = {
    "hyperbolic": {"muxserve++": 2.3, GIVEN: 2.3, "static": 3.5},
    "arena-chat": dict.fromkeys(BASELINES, 3.0),
}
"""At 99 % TTFT, Prism over a baseline; on Arena-Chat, over 3 over each."""
ROW_1 = "§7.3, Figure 7, first row"
TTFT_SAID: tuple[tuple[Levels, str], ...] = (
    (PRISM_FIRST, ROW_1),
    (("static", "qlm"), ROW_1),
    ((("prism", "muxserve++", "static", "qlm"), "serverlessllm"), f"§7.2, {OSDI}"),
)
TPOT_SAID: tuple[tuple[Levels, str], ...] = (
    (("prism", "qlm"), ROW_1),
    (("qlm", "serverlessllm"), f"§7.2, {OSDI}"),
)


def by_rate(lab: Lab) -> Findings:
    rates = lab.pick((8.0, 16.0, 32.0, 48.0), (4.0, 16.0))
    compared, table, plots, remarks, budget = [], [], {}, [], [FAIR_TUNED]
    for style in STYLES:
        cluster = eight(lab, style)
        fixed = {"slo_scale": SLO_SCALES[style]}
        by_policy, lost = sweep(lab, cluster, "rate_scale", rates, fixed)
        remarks += [reason for reason in lost if reason not in remarks]
        budget += [*cluster.tuned.said, f"{style}: {cluster.described()}"]
        table += rows(style, "rate_scale", by_policy)
        ttft, tpot = (lines(by_policy, metric) for metric in METRICS)
        for metric, found, said in (("ttft", ttft, TTFT_SAID), ("tpot", tpot, TPOT_SAID)):
            title = f"{metric.upper()} by rate, {style}"
            plots[f"{style}-{metric}"] = figure(title, "rate scale", found, metric)
            shares = {policy: mean(points) for policy, points in found.items()}
            what = f"{style}: mean {metric.upper()} attainment over the rates"
            for levels, source in said:
                compared += orders(what, shares, source, levels)
            if findings.order(what, shares, ("qlm", "serverlessllm"), ROW_1).agrees is False:
                compared += engine_starts(lab, cluster, fixed, what, metric=metric, found=found)
        compared += degrading(lab, cluster, style, fixed, tpot)
        compared += more_requests(style, ttft)
    return Findings(compared, table, plots, budget, remarks)


def more_requests(style: str, found: Lines) -> list[Comparison]:
    """Where a baseline is below the target from the lowest rate on, the factor is more than that
    over the lowest."""
    held = {policy: up_to(points) for policy, points in found.items()}
    what = f"{style}: requests at 99 % TTFT, Prism over"
    source, prism, compared = f"{ROW_1} (factors: §7.2, {OSDI})", held.get("prism"), []
    for system, said in MORE_REQUESTS[style].items():
        if system not in found:
            continue
        (lowest, share), most = found[system][0], held[system]
        factor, bound = findings.ratio(prism, most), None
        if prism and most is None and share is not None and prism > (1 + findings.EQUAL) * lowest:
            bound = prism / lowest
        one = findings.factor(f"{what} {system}", factor or bound, said, source)
        if bound:
            one = msgspec.structs.replace(one, ours=f"over {one.ours}", verdict="same direction")
        compared.append(one)
        if system == "muxserve++" and GIVEN in found and one.agrees is False:
            given = findings.ratio(prism, held[GIVEN])
            compared.append(findings.cause(f"{what} {AT_TP}", factor, given))
    return compared


# --- TPOT at high rates --------------------------------------------------------------------

DEGRADING = ("muxserve++", GIVEN, "static")
TIGHT_RATE = 32.0
"""Table 1's load, the highest at which GPUs of TIGHT are tried; at 48 a sixth of all is lost."""


def degrading(
    lab: Lab, cluster: Cluster, style: str, fixed: Mapping[str, Any], tpot: Lines
) -> list[Comparison]:
    """What is said of TPOT at high rates; where it does not hold, whether memory is why."""
    known = {system: tpot[system] for system in DEGRADING if system in tpot}
    said = {system: degrades(style, system, points) for system, points in known.items()}
    level = {system: known[system] for system, one in said.items() if one.agrees is False}
    return [*said.values(), *less_memory(lab, cluster, style, fixed, level)]


def degrades(style: str, system: str, points: Sequence[tuple[Any, float | None]]) -> Comparison:
    """From the lowest rate to the highest, by more than EQUAL of all requests."""
    what = f"{style}: TPOT attainment degrades at high rates, {system}"
    known = [(x, y) for x, y in points if y is not None]
    if len(known) < 2:
        return findings.claim(what, None, "-", "significantly", ROW_1)
    (low, first), (high, last) = known[0], known[-1]
    shown = f"{first:.1f} % at rate scale {low:g}, {last:.1f} % at {high:g}"
    holds = first - last > 100 * findings.EQUAL
    return findings.claim(what, holds, shown, "significantly", ROW_1)


def less_memory(
    lab: Lab, cluster: Cluster, style: str, fixed: Mapping[str, Any], level: Lines
) -> list[Comparison]:
    """Whether the TPOT of the systems of `level` degrades on GPUs with less memory, from the lowest
    rate to TIGHT_RATE, where it does not with all of it."""
    # with the number of GPUs, as Table 1 has it, whose points these are at its load
    tight = {**fixed, "gpus.count": 2, "gpus.memory": TIGHT}
    whole = {
        s: [point for point in points if point[0] <= TIGHT_RATE] for s, points in level.items()
    }
    ends = {system: (points[0][0], points[-1][0]) for system, points in whole.items()}
    trials = [
        at(cluster, s, **tight, rate_scale=rate) for s, rates in ends.items() for rate in rates
    ]
    outcomes = iter(lab.run(trials, f"GPUs of {TIGHT}") if trials else ())
    compared = []
    for system, rates in ends.items():
        points = [(rate, attainment(next(outcomes), "tpot")) for rate in rates]
        here, changed = (degrades(style, system, line) for line in (whole[system], points))
        one = msgspec.structs.replace(
            changed,
            what=f"{changed.what}, GPUs of {TIGHT} each",
            ours=f"{here.ours}; changed {changed.ours}",
            agrees=changed.agrees and here.agrees is False,
        )
        compared.append(findings.ablated(one))
    return compared


# --- ServerlessLLM and QLM -----------------------------------------------------------------

STARTED = {"activation.layout": "15s"}
"""ServerlessLLM's starts where each is of a new engine, for as long as QLM's is (§7.5). It keeps
an idle model for as long as a start takes (`policies.serverlessllm`), so for longer as well."""


def engine_starts(
    lab: Lab, cluster: Cluster, fixed: Mapping[str, Any], what: str, *, metric: str, found: Lines
) -> list[Comparison]:
    """§7.5 charges QLM the start of an engine for each swap; what ServerlessLLM pays the paper does
    not say, here it finds engines that are up. Where it is before QLM: if both start one, and if
    neither does. found: attainments by rate; compared by their means."""
    points = [{**fixed, "rate_scale": rate} for rate, _ in found["qlm"]]
    trials = [at(cluster, "serverlessllm", **point, **STARTED) for point in points]
    trials += [at(cluster, "qlm", **point, **AS_FAST) for point in points]
    outcomes = lab.run(trials, "engine starts")
    halves = outcomes[: len(points)], outcomes[len(points) :]
    started, pooled = (whole_mean([attainment(o, metric) for o in half]) for half in halves)
    qlm, serverless = (mean(found[name]) for name in ("qlm", "serverlessllm"))
    here = findings.ratio(qlm, serverless)
    over = f"{what}, qlm over serverlessllm,"
    return [
        findings.cause(f"{over} both start engines", here, findings.ratio(qlm, started)),
        findings.cause(f"{over} neither starts one", here, findings.ratio(pooled, serverless)),
    ]
