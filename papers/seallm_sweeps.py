"""SeaLLM's evaluation under other settings: Figures 10, 11, 12 and 13 (§6.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from papers import findings
from papers import seallm_setup as services
from papers import seallm_statements as statements
from papers.a100 import slo
from papers.findings import Findings, Plot, Statement
from papers.lab import Lab
from papers.lines import Lines, Measure, Points, lines, ratio_at, study_of
from papers.seallm import RATE
from papers.tuning import Tuned

MEASURES: dict[str, tuple[Measure, bool]] = {
    "SLO attainment": services.ATTAINMENT,
    "normalised latency": services.LATENCY,
}
Loads = Mapping[Any, services.ServiceLoad]
Cause = Callable[[str, Lines], list[Statement]]
"""(measure, its lines) -> ablations."""


def _always_best(
    lab: Lab,
    tuned: Tuned,
    loads: Loads,
    figure: int,
    xlabel: str,
    *,
    measures: Sequence[str] = tuple(MEASURES),
    gpus: Mapping[Any, int] | None = None,
    more: Callable[[Points], list[Statement]] = lambda points: [],
    causes: Cause = lambda name, found: [],
) -> Findings:
    """What Figures 10 to 13 say: SeaLLM is best at every x in `measures`, and `more` that one of
    them says. None says in words by how much. causes: besides those of all figures."""
    points, source = services.under_loads(lab, tuned, loads, gpus), f"§6.3, Figure {figure}"
    compared: list[Statement] = []
    plots = {}
    for name in measures:
        measure, smaller = MEASURES[name]
        found = lines(points, measure)
        holds, shown = statements.best_everywhere(found, smaller=smaller)
        what = f"SeaLLM's {name} is the best at every x"
        compared.append(findings.claim(what, holds, shown, "all", source))
        behind = {x: loads[x] for x, _ in statements.best_ahead(found, smaller=smaller)}
        queues = lines(_with_queues(lab, tuned, behind, gpus), measure)
        compared += statements.place_causes(f"{name}, {xlabel}", found, queues, smaller=smaller)
        compared += causes(name, found)
        for other in statements.BASELINES:
            if other in found:
                best = statements.most(found, other, smaller=smaller)
                compared.append(findings.unsaid(f"{name}, over {other}, up to", best, source))
        plots[name.replace(" ", "-")] = Plot(name, xlabel, name, found, log=smaller)
    return study_of(points, [*compared, *more(points)], plots, [services.FAIR_TUNED, *tuned.said])


def _with_queues(lab: Lab, tuned: Tuned, loads: Loads, gpus: Mapping[Any, int] | None) -> Points:
    """SeaLLM with skip-join feedback queues (§6.3, "SeaLLM-M") under each load."""
    if not loads:
        return {None: {}}
    return services.under_loads(lab, tuned, loads, gpus, {"seallm": ("seallm", "M")})


def _load(lab: Lab, rate_rps: float = RATE) -> services.ServiceLoad:
    return services.ServiceLoad(lab.pick(rate_rps, 2.0), services.seconds_for(lab))


def fig10(lab: Lab) -> Findings:
    scales, same = lab.pick((2.0, 5.0, 10.0), (2.5, 5.0)), _load(lab)
    loads = {s: replace(same, slo_scale=s, slo_of_service=True) for s in scales}
    only = ("SLO attainment",)
    return _always_best(lab, services.tuned_systems(lab), loads, 10, "SLO scale", measures=only)


CROWDED = 2.0
"""Figure 11's highest cluster density."""
WHOLE, WHOLE_GPUS, WHOLE_RPS = "2-whole", 16, 4 * RATE
WHOLE_SIZE = f"{WHOLE_GPUS} GPUs and {WHOLE_RPS:g} req/s as published"
DENSITIES = {0.67: 12, 1.0: services.GPUS, CROWDED: 4}


def fig11(lab: Lab) -> Findings:
    chosen, tuned = lab.pick(DENSITIES, {1.0: 8, CROWDED: 4}), services.tuned_systems(lab)
    loads, whole = dict.fromkeys(chosen, _load(lab)), partial(_size_causes, lab, tuned)
    xlabel = "cluster density"
    return _always_best(lab, tuned, loads, 11, xlabel, gpus=chosen, more=_crowded, causes=whole)


def at_whole_size(lab: Lab, tuned: Tuned) -> Points:
    """The most crowded cluster at the paper's size, four times ours, under WHOLE alone; AlpaServe's
    search would take minutes on it."""
    loads = {WHOLE: services.ServiceLoad(WHOLE_RPS, services.seconds_for(lab))}
    systems = {name: services.SYSTEMS[name] for name in ("seallm", "muxserve", "vllm")}
    return services.under_loads(lab, tuned, loads, {WHOLE: WHOLE_GPUS}, systems)


def _size_causes(lab: Lab, tuned: Tuned, name: str, found: Lines) -> list[Statement]:
    """Where baselines are ahead on the most crowded cluster: the same at the paper's size. Our four
    GPUs are one group, in which all services take turns; §6.1 shares at most two."""
    measure, smaller = MEASURES[name]
    behind = [other for x, other in statements.best_ahead(found, smaller=smaller) if x == CROWDED]
    others = [other for other in behind if other != "alpaserve"]
    if lab.quick or not others:
        return []
    there = lines(at_whole_size(lab, tuned), measure)
    return [
        findings.cause(
            f"{name}, cluster density at {CROWDED:g}, over {other}, {WHOLE_SIZE}",
            ratio_at(found, CROWDED, "seallm", other, smaller=smaller),
            ratio_at(there, WHOLE, "seallm", other, smaller=smaller),
            wanted=statements.ENOUGH,
        )
        for other in others
    ]


def _crowded(points: Points) -> list[Statement]:
    source, found = "§6.3, Figure 11", lines(points, slo)
    gains = statements.gains_of(found)
    largest = max(gains, key=lambda gain: gain[1], default=None)
    most_there = None if largest is None else largest[0] == gains[-1][0]
    left_out = list(points.values())[-1]["muxserve"]
    what = "'s SLO attainment with the cluster's density"
    return [
        statements.falls(found, "alpaserve", what, source, statements.FAST_FALL),
        findings.claim(
            "MuxServe finds no placement on the most crowded cluster",
            left_out.summary is None or left_out.lost > 0,
            f"{left_out.lost} requests are of services left out" if left_out.lost else "it does",
            "cannot find one",
            source,
        ),
        findings.claim(
            "SeaLLM is ahead of the best baseline most on the most crowded cluster",
            most_there,
            ", ".join(f"{gain:+.1f} points at {x:g}" for x, gain in gains),
            "especially there",
            source,
        ),
        *([statements.crowded_cause(found)] if most_there is False else []),
    ]


def fig12(lab: Lab) -> Findings:
    skews, same = lab.pick((2, 8, 32), (2, 8)), _load(lab)
    loads, tuned = {n: replace(same, skew=n) for n in skews}, services.tuned_systems(lab)
    xlabel, causes = "consecutive requests of one service", partial(_this_trace, lab, tuned, loads)
    found = _always_best(lab, tuned, loads, 12, xlabel, more=_skewed, causes=causes)
    if found.comparisons[-1].agrees or lab.quick:  # muxserve's, the last of `_skewed`
        return found
    more = _more_load(lab, tuned, loads)
    return msgspec.structs.replace(found, comparisons=[*found.comparisons, more])


def _this_trace(lab: Lab, tuned: Tuned, loads: Loads, name: str, found: Lines) -> list[Statement]:
    """Where latencies differ little, one trace of a minute decides."""
    measure, smaller = MEASURES[name]
    if not smaller:
        return []
    return [
        made
        for x, other in statements.best_ahead(found, smaller=True)
        if other != "muxserve"
        for made in services.on_other_traces(
            lab, tuned, found, (x, other), loads[x], measure=(name, measure)
        )
    ]


MORE_RPS = 16.0


def _more_load(lab: Lab, tuned: Tuned, loads: Mapping[int, services.ServiceLoad]) -> Statement:
    """Where MuxServe serves all in time at either end, more of the same may tell them apart."""
    ends, only = [min(loads), max(loads)], {"muxserve": services.SYSTEMS["muxserve"]}
    here, changed = (
        statements.fall_of(
            services.under_loads(
                lab,
                tuned,
                {f"{x}-at-{rate:g}": replace(loads[x], rate_rps=rate) for x in ends},
                systems=only,
            ),
            "muxserve",
        )
        for rate in (RATE, MORE_RPS)
    )
    at = f"at a skew of {ends[0]} and {ends[-1]}, {MORE_RPS:g} req/s"
    what = f"by what muxserve's SLO attainment falls with the skew, {at}"
    return findings.cause(what, here, changed)


STEADY_POINTS = 5.0


def _skewed(points: Points) -> list[Statement]:
    source, found = "§6.3, Figure 12", lines(points, slo)
    values = {name: [v for _, v in line if v is not None] for name, line in found.items()}
    spans = {
        name: max(line) - min(line)
        for name, line in values.items()
        if line and name != services.FIXED
    }
    return [
        findings.claim(
            "SeaLLM's SLO attainment does not fluctuate much with the skew (read as: by up to "
            f"{STEADY_POINTS:g} points)",
            spans["seallm"] <= STEADY_POINTS if "seallm" in spans else None,
            ", ".join(f"{name} by {span:.1f} points" for name, span in spans.items()),
            "does not fluctuate much",
            source,
        ),
        *(
            statements.falls(
                found, name, "'s SLO attainment with the skew", source, statements.SLIGHT_FALL
            )
            for name in statements.BASELINES
        ),
    ]


def fig13(lab: Lab) -> Findings:
    spreads, same = lab.pick((0.0, 2.0, 16.0), (0.0, 4.0)), _load(lab, RATE / 2)
    loads = {s: replace(same, spread=s) for s in spreads}
    xlabel = "spread of output lengths"
    return _always_best(lab, services.tuned_systems(lab), loads, 13, xlabel, more=_all_worse)


def _all_worse(points: Points) -> list[Statement]:
    source, found = "§6.3, Figure 13", lines(points, slo)
    what = "'s SLO attainment at a high variance of the output length"
    compared = [
        statements.falls(found, name, what, source, statements.WORSE)
        for name in ("seallm", *statements.BASELINES)
    ]
    for name, (measure, smaller) in MEASURES.items():
        what = f"SeaLLM's benefit over the best baseline at a high variance, {name}"
        compared.append(statements.shrinks(lines(points, measure), what, source, smaller=smaller))
    return compared
