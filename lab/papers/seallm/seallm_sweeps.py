"""SeaLLM's evaluation under other settings: Figures 10, 11, 12 and 13 (§6.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lab.papers.seallm import seallm_setup as services
from lab.papers.seallm import seallm_statements as statements
from lab.papers.seallm.seallm_overall import RATE
from lab.papers.study import findings
from lab.papers.study.a100 import slo
from lab.papers.study.findings import Findings, Plot, Statement
from lab.papers.study.lab import Lab
from lab.papers.study.lines import Measure, Points, lines, study_of
from lab.papers.study.tuning import Tuned

MEASURES: dict[str, tuple[Measure, bool]] = {
    "SLO attainment": services.ATTAINMENT,
    "normalised latency": services.LATENCY,
}
Loads = Mapping[Any, services.ServiceLoad]


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
) -> Findings:
    """Runs one of Figures 10 to 13: SeaLLM is best at every x in `measures`.

    The paper's text has no factors for them.

    Args:
        more: Returns further statements of the figure.
    """
    points, source = services.under_loads(lab, tuned, loads, gpus), f"§6.3, Figure {figure}"
    compared: list[Statement] = []
    plots = {}
    for name in measures:
        measure, smaller = MEASURES[name]
        found = lines(points, measure)
        holds, shown = statements.best_everywhere(found, smaller=smaller)
        what = f"SeaLLM's {name} is the best at every x"
        compared.append(findings.claim(what, holds, shown, "all", source))
        for other in statements.BASELINES:
            if other in found:
                best = statements.most(found, other, smaller=smaller)
                compared.append(findings.unpublished(f"{name}, over {other}, up to", best, source))
        plots[name.replace(" ", "-")] = Plot(name, xlabel, name, found, log=smaller)
    return study_of(points, [*compared, *more(points)], plots, [services.FAIR_TUNED, *tuned.log])


def _load(lab: Lab, rate_rps: float = RATE) -> services.ServiceLoad:
    return services.ServiceLoad(lab.pick(rate_rps, 2.0), services.seconds_for(lab))


def fig10(lab: Lab) -> Findings:
    scales, same = lab.pick((2.0, 5.0, 10.0), (2.5, 5.0)), _load(lab)
    loads = {s: replace(same, slo_scale=s, slo_of_service=True) for s in scales}
    only = ("SLO attainment",)
    return _always_best(lab, services.tuned_systems(lab), loads, 10, "SLO scale", measures=only)


CROWDED = 2.0
"""Figure 11's highest cluster density."""
DENSITIES = {0.67: 12, 1.0: services.GPUS, CROWDED: 4}


def fig11(lab: Lab) -> Findings:
    chosen, tuned = lab.pick(DENSITIES, {1.0: 8, CROWDED: 4}), services.tuned_systems(lab)
    loads = dict.fromkeys(chosen, _load(lab))
    return _always_best(lab, tuned, loads, 11, "cluster density", gpus=chosen, more=_crowded)


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
            f"{left_out.lost} requests of services without a placement"
            if left_out.lost
            else "it does",
            "cannot find one",
            source,
        ),
        findings.claim(
            "SeaLLM is ahead of the best baseline most on the most crowded cluster",
            most_there,
            {f"points at {x:g}": gain for x, gain in gains},
            "especially there",
            source,
        ),
        *([statements.crowded_cause(found)] if most_there is False else []),
    ]


def fig12(lab: Lab) -> Findings:
    skews, same = lab.pick((2, 8, 32), (2, 8)), _load(lab)
    loads, tuned = {n: replace(same, skew=n) for n in skews}, services.tuned_systems(lab)
    xlabel = "consecutive requests of one service"
    return _always_best(lab, tuned, loads, 12, xlabel, more=_skewed)


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
            {f"points, {name}": span for name, span in spans.items()},
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
