"""What turns what Prism's Figure 7 says of rates (§7.3) where ours differs: changes of the setup
that are not the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prism.studies import findings
from prism.studies.findings import Comparison
from prism.studies.lab import Lab
from prism.studies.prism_setup import Cluster, attainment
from prism.studies.prism_sweeps import AS_FAST, METRICS, TIGHT, at

STARTED = {"activation.layout": "15s"}
"""ServerlessLLM's starts where each is a new engine, which takes what it takes QLM (§7.5)."""


def less_memory(
    lab: Lab, cluster: Cluster, style: str, fixed: Mapping[str, Any], systems: Sequence[str]
) -> list[Comparison]:
    """Whether the TPOT of `systems` degrades where memory is short at high rates."""
    low, high = lab.pick((8.0, 32.0), (4.0, 16.0))
    tight = {**fixed, "gpus.count": 2, "gpus.memory": TIGHT}
    trials = [at(cluster, s, **tight, rate_scale=rate) for s in systems for rate in (low, high)]
    shares = [attainment(found, "tpot") for found in lab.run(trials, f"GPUs of {TIGHT}")]
    what = f"ablation: {style}: TPOT attainment degrades at high rates,"
    return [
        Comparison(
            f"{what} {system}, GPUs of {TIGHT} each",
            f"{first:.1f} % at rate scale {low:g}, {last:.1f} % at {high:g}",
            "not published",
            "names the cause" if first - last > 100 * findings.EQUAL else "is not the cause",
            "ours",
        )
        for system, first, last in zip(systems, shares[::2], shares[1::2], strict=True)
        if first is not None and last is not None
    ]


def engine_starts(
    lab: Lab,
    cluster: Cluster,
    style: str,
    swept: tuple[Mapping[str, Any], Sequence[float]],
    shares: Mapping[str, Mapping[str, float | None]],
) -> list[Comparison]:
    """§7.5 charges QLM the start of an engine for each swap; what the paper's ServerlessLLM pays it
    does not say, here it finds engines that are up. Where it is before QLM: both if it starts one
    each time, and if QLM finds them as well. swept: what all points have, and the rates. shares:
    metric -> system -> the mean over the rates."""
    here = {
        m: findings.ratio(shares[m].get("qlm"), shares[m].get("serverlessllm")) for m in METRICS
    }
    ahead = [metric for metric, ratio in here.items() if ratio and ratio < 1 - findings.EQUAL]
    if not ahead:
        return []
    fixed, rates = swept
    points = [{**fixed, "rate_scale": rate} for rate in rates]
    trials = [at(cluster, "serverlessllm", **point, **STARTED) for point in points]
    trials += [at(cluster, "qlm", **point, **AS_FAST) for point in points]
    outcomes = lab.run(trials, "engine starts")
    compared = []
    for metric in ahead:
        each = [attainment(outcome, metric) or 0.0 for outcome in outcomes]
        started, pooled = sum(each[: len(rates)]), sum(each[len(rates) :])
        qlm = (shares[metric]["qlm"] or 0.0) * len(rates)
        what = f"{style}: mean {metric.upper()} attainment, qlm over serverlessllm that starts an "
        what += "engine each time, as QLM does"
        alone, both = findings.ratio(qlm, started), findings.ratio(pooled, started)
        compared += [
            findings.cause(what, here[metric], alone),
            findings.cause(f"{what}, and QLM does not", here[metric], both),
        ]
    return compared
