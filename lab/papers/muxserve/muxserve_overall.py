"""MuxServe's end-to-end results on synthetic workloads: Figure 5 (§4.2)."""

from __future__ import annotations

from collections.abc import Mapping

from lab.papers.muxserve import muxserve_setup as setup
from lab.papers.study import findings
from lab.papers.study.a100 import slo
from lab.papers.study.findings import Findings, Plot, Statement
from lab.papers.study.lab import Lab
from lab.papers.study.lines import (
    Lines,
    best_ratio,
    better_systems,
    lines,
    outcomes,
    problems,
    rows,
    up_to,
)
from lab.papers.study.tuning import simulated

PUBLISHED_SYNTHETIC = {"throughput": 1.8, "requests": 2.9}
"""Maximum factors over either baseline: throughput, and requests at 99 % SLO attainment (§4.2)."""
RPS = "throughput (req/s, weighted by rate)"
SLO = "SLO attainment (%)"
PER_MODEL = "average rate (req/s per model)"
BASELINES = ("spatial", "temporal")


def synthetic(lab: Lab) -> Findings:
    models, tuned = setup.nineteen(), setup.tuned_systems(lab)
    table, plots, every = [], {}, []
    rates: dict[float, Lines] = {}
    shares: dict[float, Lines] = {}
    for alpha in lab.pick((0.9, 2.1), (0.9,)):
        weight = sum((m.rank + 1) ** -alpha for m in models)
        setups: dict[float, str] = {}
        for most in lab.pick((5.0, 20.0, 60.0), (1.0,)):
            trace = setup.power_law(lab, models, most * weight, alpha, lab.pick(40.0, 8.0))
            config = lab.setup(f"alpha{alpha:g}-rate{most:g}", setup.cluster(models, 32), trace)
            setups[round(most * weight / len(models), 3)] = config
        points = simulated(lab, setups, setup.SYSTEMS, tuned)
        rates[alpha], shares[alpha] = lines(points, setup.throughput), lines(points, slo)
        every += outcomes(points)
        table += rows(points, alpha=alpha)
        for what, ylabel, found in (("throughput", RPS, rates), ("slo", SLO, shares)):
            name = f"{what}-{alpha:g}".replace(".", "-")
            plots[name] = Plot(f"alpha {alpha:g}", PER_MODEL, ylabel, found[alpha])
    compared = [*_throughputs(rates), requests_at_target(shares)]
    if len(shares) > 1:
        steep = max(shares)
        compared.append(
            highest_attainment(f", alpha {steep:g}", shares[steep], "higher", "§4.2, Figure 5")
        )
    return Findings(compared, table, plots, [setup.FAIR_TUNED, *tuned.log], problems(every))


def _throughputs(by_alpha: Mapping[float, Lines]) -> list[Statement]:
    source, compared, best = "§4.2, Figure 5", [], []
    for alpha, rates in by_alpha.items():
        holds, shown = outperforms(rates)
        what = f"alpha {alpha:g}: MuxServe's throughput is the highest at every rate"
        compared.append(findings.claim(what, holds, shown, "in all scenarios", source))
        for name in BASELINES:
            best.append(best_ratio(rates, "muxserve", name))
            what = f"alpha {alpha:g}: throughput, MuxServe over {name}, at most"
            compared.append(findings.unpublished(what, best[-1], source))
    most = max((r for r in best if r is not None), default=None)
    what, said = "throughput over either baseline, at most", PUBLISHED_SYNTHETIC["throughput"]
    return [*compared, findings.factor(what, most, said, source)]


def outperforms(found: Lines) -> tuple[bool | None, str]:
    """Returns whether MuxServe is never worse, and a text. None if a baseline always equals it."""
    if better_systems(found, "muxserve", BASELINES):
        return False, "not at every rate"
    best = {name: best_ratio(found, "muxserve", name) for name in BASELINES}
    equals = [name for name, r in best.items() if r is not None and r <= 1 + findings.EQUAL]
    return (None, f"equal to {' and '.join(equals)} at every rate") if equals else (True, "it is")


def requests_at_target(by_alpha: Mapping[float, Lines]) -> Statement:
    """Compares the factor of requests at 99 % SLO attainment."""
    most = target_rate_ratio(by_alpha)
    what = "requests within 99 % SLO attainment over either baseline, at most"
    source, said = "§4.2, Figure 5", PUBLISHED_SYNTHETIC["requests"]
    return findings.factor(what, most, said, source)


def target_rate_ratio(by_alpha: Mapping[float, Lines]) -> float | None:
    """Returns the largest ratio of the rates up to which SLO attainment is 99 %.

    Rates are interpolated. Baselines below 99 % at the lowest rate do not count.
    """
    found: list[float] = []
    for shares in by_alpha.values():
        held = {name: up_to(points) for name, points in shares.items()}
        for name, most in held.items():
            ratio = findings.ratio(held["muxserve"], most)
            if name != "muxserve" and ratio is not None:
                found.append(ratio)
    return max(found, default=None)


def highest_attainment(label: str, shares: Lines, said: str, source: str) -> Statement:
    holds, shown = outperforms(shares)
    what = f"MuxServe's SLO attainment is the highest at every rate{label}"
    return findings.claim(what, holds, shown, said, source)
