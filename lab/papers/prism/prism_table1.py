"""Prism's Table 1: SLO attainment with two GPUs, and GPUs needed (§1, §7.3)."""

from __future__ import annotations

from collections.abc import Mapping

from lab.papers.prism import prism_sweeps as sweeps
from lab.papers.prism.prism_setup import FAIR_TUNED, Cluster
from lab.papers.prism.prism_sweeps import AWARE, GIVEN, LISTED
from lab.papers.study import findings
from lab.papers.study.findings import Findings, Plot, Statement
from lab.papers.study.lab import Lab
from lab.papers.study.lines import Lines, first_at_target
from lab.papers.study.tuning import Settings

SHARES = {
    "prism": 99.0,
    **dict.fromkeys(("muxserve++", GIVEN, LISTED), 51.0),
    **dict.fromkeys(("qlm", AWARE), 45.0),
    "static": 39.0,
}
"""SLO attainment with two GPUs, in percent, best first."""
NEEDED = {
    "prism": 2,
    **dict.fromkeys(("muxserve++", GIVEN, LISTED), 5),
    "static": 7,
    **dict.fromkeys(("qlm", AWARE), 8),
}
TABLE: sweeps.Levels = ("prism", "muxserve++", "qlm", "static")
SHOWN = "TTFT attainment on 2 GPUs"
STYLE = "hyperbolic"
OUTSIDE = ("2GiB", "3GiB")
"""An engine's memory in addition to weights and KV, instead of the simulator's 1 GiB: the reserve
of `prism-serve` on a GPU, and more. The paper does not state it."""


def table1(lab: Lab) -> Findings:
    return _table(lab, sweeps.EIGHT)


def table1_8b(lab: Lab) -> Findings:
    return _table(lab, sweeps.EIGHT_8B)


def _table(lab: Lab, models: sweeps.Models) -> Findings:
    cluster = sweeps.eight_model_cluster(lab, STYLE, models)
    study = Findings([], [], {}, [FAIR_TUNED])
    fixed = {"slo_scale": sweeps.SLO_SCALES[STYLE]}
    load = fixed["rate_scale"] = sweeps.held_rate(lab, cluster, {**fixed, "gpus.count": 2})
    counts = lab.pick((2, 5, 7, 8), (2, 3))
    points = sweeps.sweep(lab, cluster, "gpus.count", counts, fixed, whole=sweeps.EIGHT_SYSTEMS)
    sweeps.gather(study, points, cluster, STYLE, "gpus")
    study.remarks.append(
        f"The load is rate scale {load:g}, the highest tried at which Prism holds 99 % TTFT on 2 "
        "GPUs, so Prism's row agrees by the choice of the load"
    )
    found = sweeps.attainments(points, "ttft")
    study.plots["gpus"] = sweeps.figure("TTFT attainment by GPUs", "GPUs", found, "ttft")
    with_two = {policy: line[0][1] for policy, line in found.items()}
    study.comparisons.extend(sweeps.orders(SHOWN, with_two, "Table 1", TABLE))
    for system, said in SHARES.items():
        if system in with_two:
            what = f"{SHOWN}, {system}"
            here = with_two[system]
            study.comparisons.append(findings.value(what, here, said, "Table 1", unit="%"))
    study.comparisons.extend(_gpus(found))
    larger = _outside(lab, cluster, {**fixed, "gpus.count": 2}, with_two)
    study.plots["outside"] = Plot(
        BY_STATIC, "of each engine", "TTFT attainment (%)", larger, bars=True
    )
    study.comparisons.extend(_by_size(name, dict(line)) for name, line in larger.items())
    return study


def _gpus(found: Lines) -> list[Statement]:
    """Compares the GPUs for 99 % TTFT, and whether more GPUs help QLM.

    §7.5 states for 58 models that they do not; Table 1 has the number with which QLM reaches 99 %.
    """
    compared = []
    for system, said in NEEDED.items():
        if system in found:
            line = found[system]
            what, needed, most = f"GPUs for 99 % TTFT, {system}", first_at_target(line), line[-1][0]
            compared.append(findings.reached(what, needed, said, "Table 1", unit="GPUs", most=most))
    for system in ("qlm", AWARE):
        ends = sweeps.known_ends(found.get(system, []))
        if ends is not None:
            (few, first), (many, last) = ends
            what = f"more GPUs do not help, {system}"
            holds = last - first <= 100 * findings.EQUAL
            shares = {f"% with {few}": first, f"% with {many}": last}
            compared.append(findings.claim(what, holds, shares, "does not improve", "§7.5"))
    return compared


BY_STATIC = "TTFT attainment by memory in addition to weights and KV"


def _outside(
    lab: Lab, cluster: Cluster, fixed: Settings, with_two: Mapping[str, float | None]
) -> Lines:
    """Returns the attainments by OUTSIDE, given those at 1 GiB (`with_two`)."""
    sizes = lab.pick(OUTSIDE, ())
    trials = [
        sweeps.at(cluster, name, **fixed, **{"engine.static": size})
        for name in with_two
        for size in sizes
    ]
    shares = iter(sweeps.attained(lab, trials))
    return {
        name: [("1GiB", here), *((size, next(shares)) for size in sizes)]
        for name, here in with_two.items()
    }


def _by_size(name: str, shares: Mapping[str, float | None]) -> Statement:
    what = f"{SHOWN} by memory in addition to weights and KV, {name}"
    found = Statement(what, "", "not published", "not counted", "ours")
    return findings.noted(found, {f"% at {size}": share for size, share in shares.items()})
