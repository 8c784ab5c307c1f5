"""Prism's Figure 7: SLO attainment by rate, by SLO scale and by GPUs (§7.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lab.papers.prism import prism_sweeps as sweeps
from lab.papers.prism.prism_setup import FAIR_TUNED, eighteen, model_names, prepared
from lab.papers.study import findings
from lab.papers.study.findings import Findings, Statement
from lab.papers.study.lab import Lab
from lab.papers.study.lines import TARGET, Line, Lines, first_at_target, mean, ratios, up_to
from lab.papers.study.sources import STYLES

MORE_REQUESTS: dict[str, dict[str, float]] = {
    "hyperbolic": {"muxserve++": 2.3, sweeps.GIVEN: 2.3, "static": 3.5},
    "arena-chat": dict.fromkeys(sweeps.BASELINES, 3.0),
}
"""Style -> baseline -> factor in requests at 99 % TTFT; "over 3" for each on Arena-Chat."""
ROW_1 = "§7.3, Figure 7, first row"
SAID: dict[str, tuple[tuple[sweeps.Levels, str], ...]] = {
    "ttft": (
        (sweeps.PRISM_FIRST, ROW_1),
        (("static", "qlm"), ROW_1),
        ((("prism", "muxserve++", "static", "qlm"), "serverlessllm"), f"§7.2, {sweeps.OSDI}"),
    ),
    "tpot": ((("prism", "qlm"), ROW_1), (("qlm", "serverlessllm"), f"§7.2, {sweeps.OSDI}")),
}
"""Metric -> published orders by attainment, with their sources."""


def by_rate(lab: Lab) -> Findings:
    return _by_rate(lab, sweeps.EIGHT, (8.0, 16.0, 32.0, 48.0))


def by_rate_8b(lab: Lab) -> Findings:
    return _by_rate(lab, sweeps.EIGHT_8B, (4.0, 8.0, 16.0, 32.0))


def _by_rate(lab: Lab, models: sweeps.Models, rates: Sequence[float]) -> Findings:
    study, rates = Findings([], [], {}, [FAIR_TUNED]), lab.pick(rates, (4.0, 16.0))
    for style in STYLES:
        cluster = sweeps.eight_model_cluster(lab, style, models)
        fixed = {"slo_scale": sweeps.SLO_SCALES[style]}
        points = sweeps.sweep(lab, cluster, "rate_scale", rates, fixed, whole=sweeps.EIGHT_SYSTEMS)
        sweeps.gather(study, points, cluster, style, "rate_scale", where=style)
        by_metric = {metric: sweeps.attainments(points, metric) for metric in sweeps.METRICS}
        for metric, found in by_metric.items():
            title = f"{metric.upper()} by rate, {style}"
            study.plots[f"{style}-{metric}"] = sweeps.figure(title, "rate scale", found, metric)
            shares = {policy: mean(line) for policy, line in found.items()}
            what = f"{style}: mean {metric.upper()} attainment over the rates"
            for levels, source in SAID[metric]:
                study.comparisons.extend(sweeps.orders(what, shares, source, levels))
        study.comparisons.extend(degrading(style, by_metric["tpot"]))
        study.comparisons.extend(more_requests(style, by_metric["ttft"]))
    return study


def more_requests(style: str, found: Lines) -> list[Statement]:
    """Compares the factors in requests at 99 % TTFT.

    A baseline below the target at the lowest rate counts with that rate, so that its factor is a
    lower bound.
    """
    held = {system: up_to(line) for system, line in found.items()}
    held |= {s: held[s] or line[0][0] for s, line in found.items() if s != "prism"}
    what = f"{style}: requests at 99 % TTFT, or at the lowest rate, Prism over"
    source, compared = f"{ROW_1} (factors: §7.2, {sweeps.OSDI})", []
    factors = {s: findings.ratio(held.get("prism"), most) for s, most in held.items()}
    for system, said in MORE_REQUESTS[style].items():
        if system not in found:
            continue
        one = findings.factor(f"{what} {system}", factors[system], said, source)
        compared.append(one)
        if system == "muxserve++" and sweeps.GIVEN in found and one.agrees is False:
            both = factors[system], factors[sweeps.GIVEN]
            compared.append(findings.cause(f"{what} {sweeps.AT_TP}", *both))
    return compared


# --- TPOT at high rates --------------------------------------------------------------------

DEGRADING = ("muxserve++", sweeps.GIVEN, sweeps.LISTED, "static")


def degrading(style: str, tpot: Lines) -> list[Statement]:
    return [degrades(style, system, tpot[system]) for system in DEGRADING if system in tpot]


def degrades(style: str, system: str, line: Line) -> Statement:
    """Compares whether attainment falls from the lowest to the highest rate by more than EQUAL."""
    what, ends = (
        f"{style}: TPOT attainment degrades at high rates, {system}",
        sweeps.known_ends(line),
    )
    if ends is None:
        return findings.claim(what, None, "-", "significantly", ROW_1)
    (low, first), (high, last) = ends
    shares = {f"% at rate scale {low:g}": first, f"% at {high:g}": last}
    holds = first - last > 100 * findings.EQUAL
    return findings.claim(what, holds, shares, "significantly", ROW_1)


# --- by SLO scale --------------------------------------------------------------------------

AT_99 = {
    ("hyperbolic", "ttft"): {"prism": 20.0},
    ("hyperbolic", "tpot"): {"prism": 22.0, "static": 26.0},
    ("arena-chat", "ttft"): {"prism": 10.0},
    ("arena-chat", "tpot"): {"prism": 3.0, "qlm": 3.5},
}
BEST_BASELINE = {"hyperbolic": 84.79, "arena-chat": 67.22}
ROW_2 = "§7.3, Figure 7, middle row"
MUXSERVE_FIRST: sweeps.Levels = ("prism", "muxserve++", ("static", "qlm", "serverlessllm"))


def by_slo(lab: Lab) -> Findings:
    return _by_slo(lab, sweeps.EIGHT)


def by_slo_8b(lab: Lab) -> Findings:
    return _by_slo(lab, sweeps.EIGHT_8B)


def _by_slo(lab: Lab, models: sweeps.Models) -> Findings:
    """Runs Figure 7 by SLO scale, separately for TTFT and TPOT.

    The scales are half, one and two times those at which the paper has Prism at 99 %.
    """
    study = Findings([], [], {}, [FAIR_TUNED])
    for style in STYLES:
        cluster, own = sweeps.eight_model_cluster(lab, style, models), sweeps.SLO_SCALES[style]
        load = sweeps.held_rate(lab, cluster, {"slo_scale": own})
        scales = [own * factor for factor in lab.pick((0.5, 1.0, 2.0), (0.5, 1.0))]
        systems, fixed = sweeps.EIGHT_SYSTEMS, {"rate_scale": load}
        points = sweeps.sweep(lab, cluster, "slo_scale", scales, fixed, whole=systems)
        where = f"{style}, rate scale {load:g}"
        sweeps.gather(study, points, cluster, style, "slo_scale", where=where)
        by_metric = {metric: sweeps.attainments(points, metric) for metric in sweeps.METRICS}
        part = sweeps.tpot_part(style)
        by_metric["tpot"] = {
            name: [(scale * part, share) for scale, share in line]
            for name, line in by_metric["tpot"].items()
        }
        for metric, found in by_metric.items():
            title = f"{metric.upper()} by SLO scale, {style}"
            study.plots[f"{style}-{metric}"] = sweeps.figure(title, "SLO scale", found, metric)
            for system, said in AT_99[style, metric].items():
                if system in found:
                    what = f"{style}: SLO scale at which {system} has 99 % {metric.upper()}"
                    study.comparisons.append(at_scale(what, found[system], said))
        last = {name: line[-1][1] for name, line in by_metric["ttft"].items()}
        study.comparisons.extend(largest_scale(style, last))
    return study


def at_scale(what: str, line: Line, said: float) -> Statement:
    """Compares the SLO scale at the target. No verdict if the published one is out of range."""
    first, tried = first_at_target(line), [scale for scale, _ in line]
    if first is None and said > tried[-1]:
        shown = f"not up to {tried[-1]:g}"
        return Statement(what, shown, f"{said:g}", "cannot be said here: none higher tried", ROW_2)
    if first is not None and first == tried[0] and said < first:
        shown = f"{first:g} or less"
        return Statement(what, shown, f"{said:g}", "cannot be said here: none lower tried", ROW_2)
    return findings.reached(what, first, said, ROW_2, unit="", most=tried[-1], within=0.5)


def largest_scale(style: str, last: Mapping[str, float | None]) -> list[Statement]:
    known = {name: share for name, share in last.items() if share is not None}
    what, said = f"{style}: TTFT attainment at the largest scale", BEST_BASELINE[style]
    compared = [no_baseline_reaches(f"{style}: at the largest scale,", known, ROW_2)]
    for system in ("muxserve++", sweeps.GIVEN, sweeps.LISTED):
        if system in last:
            best = f"{what}, {system}, the paper's best baseline"
            compared.append(findings.value(best, last[system], said, ROW_2, unit="%"))
    return [*compared, *sweeps.orders(what, last, ROW_2, MUXSERVE_FIRST)]


def no_baseline_reaches(where: str, shares: Mapping[str, float], source: str) -> Statement:
    """Compares whether no baseline has 99 % TTFT. Prism's share in `shares` is ignored."""
    names = sorted(set(sweeps.EIGHT_SYSTEMS) - {"prism"})
    held = [name for name in names if shares.get(name, 0.0) >= TARGET]
    shown = ", ".join(held) + (" do" if len(held) > 1 else " does") if held else "none does"
    known = any(name in shares for name in names)
    what = f"{where} no baseline has 99 % TTFT"
    return findings.claim(what, not held if known else None, shown, "none does", source)


PRISM_GPUS = {"hyperbolic": 4, "arena-chat": 5}
ROW_3 = "§7.3, Figure 7, last row"
HIGHER = {"ttft": 3.3, "tpot": 2.0}
"""Metric -> maximum factor of attainment over a baseline with the same number of GPUs."""


def by_gpus(lab: Lab) -> Findings:
    counts, study = lab.pick((2, 4, 5, 8), (4, 5)), Findings([], [], {}, [FAIR_TUNED])
    for style in STYLES:
        trace = lab.sources.styled(style, model_names(18), lab.pick(400.0, 20.0), lab.seed)
        part = sweeps.tpot_part(style)
        cluster = prepared(lab, f"eighteen-{style}", eighteen(), trace, tpot_part=part)
        cluster = replace(cluster, tuned=sweeps.tuned(lab, style))
        fixed = {"slo_scale": sweeps.SLO_SCALES[style]}
        enough = {**fixed, "gpus.count": lab.pick(PRISM_GPUS[style], 4)}
        load = fixed["rate_scale"] = sweeps.held_rate(lab, cluster, enough)
        points = sweeps.sweep(lab, cluster, "gpus.count", counts, fixed)
        sweeps.gather(study, points, cluster, style, "gpus", where=f"{style}, rate scale {load:g}")
        ttft, tpot = (sweeps.attainments(points, metric) for metric in sweeps.METRICS)
        for metric, found in zip(sweeps.METRICS, (ttft, tpot), strict=True):
            title = f"{metric.upper()} by GPUs, {style}"
            study.plots[f"{style}-{metric}"] = sweeps.figure(title, "GPUs", found, metric)
        study.comparisons.extend(fewest(style, ttft, tpot))
        study.comparisons.append(few_at_tpot(style, tpot))
        study.comparisons.append(up_to_higher(style, "ttft", ttft))
        study.comparisons.append(up_to_higher(style, "tpot", tpot))
    return study


def fewest(style: str, ttft: Lines, tpot: Lines) -> list[Statement]:
    both = [
        (x, None if a is None or b is None else min(a, b))
        for (x, a), (_, b) in zip(ttft.get("prism", []), tpot.get("prism", []), strict=True)
    ]
    most = max(x for line in ttft.values() for x, _ in line)
    what = f"{style}: GPUs for 99 % TTFT and TPOT, Prism"
    needed, said = first_at_target(both), PRISM_GPUS[style]
    highest = {name: max(y or 0.0 for _, y in line) for name, line in ttft.items()}
    return [
        findings.reached(what, needed, said, ROW_3, unit="GPUs", most=most),
        no_baseline_reaches(f"{style}: with up to {most} GPUs", highest, ROW_3),
    ]


def few_at_tpot(style: str, tpot: Lines) -> Statement:
    """Compares whether some of the baselines, but not all, have 99 % TPOT."""
    most = {name: line[-1] for name, line in tpot.items() if name in sweeps.BASELINES}
    held = [name for name, (_, share) in most.items() if share is not None and share >= TARGET]
    gpus = max((x for x, _ in most.values()), default=0)
    what = f"{style}: only a few baselines have 99 % TPOT with {gpus} GPUs"
    holds = 0 < len(held) < len(most) if len(most) > 1 else None
    shown = ", ".join(held) or "none does"
    return findings.claim(what, holds, shown, "a few, with 7 or 8", ROW_3)


def up_to_higher(style: str, metric: str, found: Lines) -> Statement:
    """Compares the maximum factor of Prism over any baseline with the same number of GPUs."""
    known = [name for name in sweeps.BASELINES if name in found]
    each = [ratio for name in known for _, ratio in ratios(found, "prism", name)]
    best = max(each, default=None)
    what = f"{style}: {metric.upper()} attainment, at most, Prism over a baseline with as many GPUs"
    return findings.factor(what, best, HIGHER[metric], f"§1 (TPOT: {sweeps.OSDI})")
