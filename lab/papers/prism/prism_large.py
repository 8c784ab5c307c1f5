"""Prism at large scale: 58 models on up to 32 GPUs, Figure 12 (§7.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lab.papers.prism import prism_sweeps as sweeps
from lab.papers.prism.prism_setup import FAIR_TUNED, fifty_eight, model_names, prepared
from lab.papers.study import findings, tuning
from lab.papers.study.findings import Findings, Statement
from lab.papers.study.lab import Lab
from lab.papers.study.lines import Lines, first_at_target, mean
from lab.papers.study.tuning import Settings, Tuned

STYLE = "arena-chat"
SLO_SCALE, TPOT_PART = 5.0, 0.4
"""SLO scale of TTFT, and that of TPOT (2) over it. At these, (b) has Prism at 99 % with 16 GPUs."""
LARGE_RATES = (4.0, 8.0, 16.0, 24.0)
GPUS = {"prism": 16, "muxserve++": 32, sweeps.GIVEN: 32}
"""System -> GPUs for nearly 99 % TTFT."""
EVEN_MORE = ("static", "qlm")
"""Systems with less than 99 % TTFT on all 32 GPUs."""
IMPROVES = {"static": True, "muxserve++": True, sweeps.GIVEN: True, "qlm": False}
"""System -> whether its attainment increases with GPUs."""
TPOT_GPUS = {"static": 20, "muxserve++": 29, "qlm": 29}
"""System -> GPUs for 99 % TPOT at SLO scales up to 3; for the last two, a lower bound."""
TPOT_ORDER: sweeps.Levels = ("static", ("muxserve++", "qlm"))
SAVED = 2.0
TUNING_SECONDS = 150.0
SOURCE = "§7.5, Figure 12"


def large(lab: Lab) -> Findings:
    counts, study = lab.pick((12, 16, 32), (32,)), Findings([], [], {}, [FAIR_TUNED])
    trace = lab.sources.styled(STYLE, model_names(58), lab.pick(300.0, 100.0), lab.seed)
    nodes = {"gpus": {"type": "h100", "count": 32, "nodes": 1}}
    cluster = prepared(lab, "fifty-eight", fifty_eight(), trace, nodes, tpot_part=TPOT_PART)
    fixed: dict[str, Any] = {"slo_scale": SLO_SCALE}
    cluster = replace(cluster, tuned=_tuned(lab, nodes, fixed))
    enough = {**fixed, "gpus.count": lab.pick(16, 32)}
    load = sweeps.held_rate(lab, cluster, enough, lab.pick(LARGE_RATES, (0.4,)))
    fixed["rate_scale"] = load
    points = sweeps.sweep(lab, cluster, "gpus.count", counts, fixed)
    sweeps.gather(study, points, cluster, STYLE, "gpus", where=f"rate scale {load:g}")
    found = {metric: sweeps.attainments(points, metric) for metric in sweeps.METRICS}
    for metric, each in found.items():
        title = f"{metric.upper()} of 58 models by GPUs"
        study.plots[metric] = sweeps.figure(title, "GPUs", each, metric)
        shares = {policy: mean(line) for policy, line in each.items()}
        what = f"mean {metric.upper()} attainment over the GPUs"
        study.comparisons.extend(sweeps.orders(what, shares, f"{SOURCE} (a)"))
    study.comparisons.extend(ttft_gpus(found["ttft"], counts[-1]))
    study.comparisons.extend(tpot_gpus(found["tpot"], counts[-1]))
    study.comparisons.extend(improvements(found))
    return study


def _tuned(lab: Lab, nodes: dict[str, Any], fixed: Settings) -> Tuned:
    there = tuning.tuning_lab(lab)
    seconds, rate, gpus = lab.pick(TUNING_SECONDS, 100.0), lab.pick(16.0, 0.4), lab.pick(16, 32)
    trace = there.sources.styled(STYLE, model_names(58), seconds, there.seed)
    cluster = prepared(
        there, "tuning-fifty-eight", fifty_eight(), trace, nodes, tpot_part=TPOT_PART
    )
    load = f"another such trace, {seconds:g} s, {gpus} GPUs at rate scale {rate:g}"
    return sweeps.tuned_on(lab, [cluster], {**fixed, "gpus.count": gpus, "rate_scale": rate}, load)


def ttft_gpus(ttft: Lines, most: int) -> list[Statement]:
    needed = {policy: first_at_target(line) for policy, line in ttft.items()}
    what, source, compared = "GPUs for 99 % TTFT", f"{SOURCE} (a)", []
    for policy, said in GPUS.items():
        if policy in needed:
            there = findings.reached(
                f"{what}, {policy}",
                needed[policy],
                said,
                source,
                unit="GPUs",
                most=most,
                within=0.3,
            )
            compared.append(there)
    for policy in EVEN_MORE:
        if policy in needed:
            gpus, more = needed[policy], f"more than {most}"
            ours = f"not up to {most}" if gpus is None else {"GPUs": gpus}
            compared.append(findings.claim(f"{what}, {policy}", gpus is None, ours, more, source))
    saved = findings.ratio(needed.get("muxserve++"), needed.get("prism"))
    return [*compared, findings.factor("GPUs, MuxServe++ over Prism", saved, SAVED, source)]


def tpot_gpus(tpot: Lines, most: int) -> list[Statement]:
    """Compares the order of the baselines by the GPUs they need."""
    needed = {policy: first_at_target(line) or most + 1.0 for policy, line in tpot.items()}
    what = f"GPUs for 99 % TPOT among the baselines ({most + 1}: not up to {most})"
    return [
        findings.order(what, needed, levels, f"{SOURCE} (b)", smaller=True)
        for levels in (TPOT_ORDER, sweeps.with_named(TPOT_ORDER, sweeps.GIVEN))
        if levels is TPOT_ORDER or sweeps.GIVEN in needed
    ]


def improvements(found: Mapping[str, Lines]) -> list[Statement]:
    """Compares whether attainment increases from the fewest to the most GPUs by more than EQUAL.

    The verdict is None if the first attainment is too close to 100 % to increase by that.
    """
    compared, bar = [], 100 * findings.EQUAL
    for metric, by_policy in found.items():
        for policy, rises in IMPROVES.items():
            ends = sweeps.known_ends(by_policy.get(policy, []))
            if ends is None:
                continue
            (fewest, first), (most, last) = ends
            holds = (last - first > bar) is rises if first < 100 - bar else None
            what = f"{metric.upper()} attainment, {policy}, from {fewest} to {most} GPUs"
            shares = {f"% with {fewest}": first, f"% with {most}": last}
            said = "improves" if rises else "does not improve"
            compared.append(findings.claim(what, holds, shares, said, f"{SOURCE} (a)"))
    return compared
