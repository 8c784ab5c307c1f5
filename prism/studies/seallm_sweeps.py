"""SeaLLM's evaluation under other settings: Figures 10, 11, 12 and 13 (§6.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from prism.studies import findings
from prism.studies.findings import Comparison, Findings, Plot
from prism.studies.lab import Lab
from prism.studies.seallm import (
    RATE,
    SETUP,
    compared_systems,
    elsewhere,
    seconds_for,
    study,
)
from prism.studies.seallm_lines import (
    BASELINES,
    FAST_FALL,
    SLIGHT_FALL,
    WORSE,
    Lines,
    Measure,
    Points,
    ahead,
    best_everywhere,
    crowded_cause,
    fall_of,
    falls,
    gains_of,
    lines,
    most,
    place_causes,
    ratio_at,
    shrinks,
)
from prism.studies.seallm_setup import (
    FAIR_TUNED,
    FIXED,
    SYSTEMS,
    Load,
    latency,
    slo,
    tuned_systems,
)
from prism.studies.tuning import Tuned

MEASURES: dict[str, tuple[Measure, bool]] = {
    "SLO attainment": (slo, False),
    "normalised latency": (latency, True),
}
"""name -> (measure, is smaller better)."""
Judge = Callable[[Points], list[Comparison]]
Cause = Callable[[str, Lines], list[Comparison]]
"""(measure, its lines) -> ablations."""


def _always_best(
    lab: Lab,
    tuned: Tuned,
    loads: Mapping[Any, Load],
    source: str,
    xlabel: str,
    *,
    measures: Sequence[str] = tuple(MEASURES),
    gpus: Mapping[Any, int] | None = None,
    more: Judge = lambda points: [],
    causes: Cause = lambda name, found: [],
) -> Findings:
    """What Figures 10 to 13 say: SeaLLM is best at every x in `measures`; and `more` that one of
    them says. By how much it is best, none says in words. causes: besides those of all figures."""
    points, table, remarks = compared_systems(lab, tuned, loads, gpus)
    compared: list[Comparison] = []
    plots = {}
    for name in measures:
        measure, smaller = MEASURES[name]
        found = lines(points, measure)
        holds, shown = best_everywhere(found, smaller=smaller)
        compared.append(
            findings.claim(f"SeaLLM's {name} is the best at every x", holds, shown, "all", source)
        )
        behind = list(dict.fromkeys(x for x, _ in ahead(found, smaller=smaller)))
        queues = lines(_with_queues(lab, tuned, {x: loads[x] for x in behind}, gpus), measure)
        compared += place_causes(f"{name}, {xlabel}", found, queues, smaller=smaller)
        compared += causes(name, found)
        compared += [
            findings.unsaid(
                f"{name}, over {other}, up to", most(found, other, smaller=smaller), source
            )
            for other in BASELINES
            if other in found
        ]
        plots[name.replace(" ", "-")] = Plot(name, xlabel, name, found, log=smaller)
    return Findings([*compared, *more(points)], table, plots, [FAIR_TUNED, *tuned.said], remarks)


def _with_queues(
    lab: Lab, tuned: Tuned, loads: Mapping[Any, Load], gpus: Mapping[Any, int] | None
) -> Points:
    """SeaLLM with skip-join feedback queues (§6.3, "SeaLLM-M") under each load."""
    if not loads:
        return {None: {}}
    return compared_systems(lab, tuned, loads, gpus, {"seallm": ("seallm", "M")})[0]


def fig10(lab: Lab) -> Findings:
    rate, scales = lab.pick(RATE, 2.0), lab.pick((2.0, 5.0, 10.0), (2.5, 5.0))
    seconds = seconds_for(lab, rate)
    loads = {s: Load(rate, seconds, slo_scale=s, slo_of_service=True) for s in scales}
    source = "§6.3, Figure 10"
    return _always_best(
        lab, tuned_systems(lab), loads, source, "SLO scale", measures=("SLO attainment",)
    )


CROWDED = 2.0
"""Figure 11's highest cluster density."""
WHOLE, WHOLE_GPUS, WHOLE_RPS = "2-whole", 16, 4 * RATE
WHOLE_SIZE = f"{WHOLE_GPUS} GPUs and {WHOLE_RPS:g} req/s as published"
DENSITIES = {0.67: 12, 1.0: 8, CROWDED: 4}


def fig11(lab: Lab) -> Findings:
    rate = lab.pick(RATE, 2.0)
    chosen = lab.pick(DENSITIES, {1.0: 8, CROWDED: 4})
    loads = dict.fromkeys(chosen, Load(rate, seconds_for(lab, rate)))
    source, xlabel = "§6.3, Figure 11", "cluster density"
    tuned = tuned_systems(lab)
    whole = partial(_size_causes, lab, tuned)
    return _always_best(lab, tuned, loads, source, xlabel, gpus=chosen, more=_crowded, causes=whole)


def at_whole_size(lab: Lab, tuned: Tuned) -> Points:
    """The most crowded cluster at the paper's size, four times ours, under WHOLE alone; AlpaServe's
    search would take minutes on it."""
    load = Load(WHOLE_RPS, seconds_for(lab, RATE))
    systems = {name: SYSTEMS[name] for name in ("seallm", "muxserve", "vllm")}
    return compared_systems(lab, tuned, {WHOLE: load}, {WHOLE: WHOLE_GPUS}, systems)[0]


def _size_causes(lab: Lab, tuned: Tuned, name: str, found: Lines) -> list[Comparison]:
    """Where baselines are ahead on the most crowded cluster: the same at the paper's size. Our four
    GPUs are one group, in which all services take turns; §6.1 shares at most two."""
    measure, smaller = MEASURES[name]
    behind = [other for x, other in ahead(found, smaller=smaller) if x == CROWDED]
    others = [other for other in behind if other != "alpaserve"]
    if lab.quick or not others:
        return []
    there = lines(at_whole_size(lab, tuned), measure)
    return [
        findings.cause(
            f"{name}, cluster density at {CROWDED:g}, over {other}, {WHOLE_SIZE}",
            ratio_at(found, CROWDED, "seallm", other, smaller=smaller),
            ratio_at(there, WHOLE, "seallm", other, smaller=smaller),
            wanted=1 - findings.EQUAL,
        )
        for other in others
    ]


def _crowded(points: Points) -> list[Comparison]:
    source, found = "§6.3, Figure 11", lines(points, slo)
    gains = gains_of(found)
    largest = max(gains, key=lambda gain: gain[1], default=None)
    most_there = None if largest is None else largest[0] == gains[-1][0]
    left_out = list(points.values())[-1]["muxserve"]
    return [
        falls(
            found, "alpaserve", "'s SLO attainment with the cluster's density", source, FAST_FALL
        ),
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
        *([crowded_cause(found)] if most_there is False else []),
    ]


def fig12(lab: Lab) -> Findings:
    rate = lab.pick(RATE, 2.0)
    skews = lab.pick((2, 8, 32), (2, 8))
    loads = {n: Load(rate, seconds_for(lab, rate), skew=n) for n in skews}
    source, xlabel = "§6.3, Figure 12", "consecutive requests of one service"
    tuned = tuned_systems(lab)
    causes = partial(_this_trace, lab, tuned, loads)
    found = _always_best(lab, tuned, loads, source, xlabel, more=_skewed, causes=causes)
    if found.comparisons[-1].agrees or lab.quick:  # muxserve's, the last of `_skewed`
        return found
    more = _more_load(lab, tuned, skews, loads)
    return msgspec.structs.replace(found, comparisons=[*found.comparisons, more])


def _this_trace(
    lab: Lab, tuned: Tuned, loads: Mapping[int, Load], name: str, found: Lines
) -> list[Comparison]:
    """Where latencies differ little, one trace of a minute decides."""
    measure, smaller = MEASURES[name]
    if not smaller:
        return []
    behind = [place for place in ahead(found, smaller=True) if place[1] != "muxserve"]
    return [
        made
        for place in behind
        for made in elsewhere(lab, tuned, found, place, loads[place[0]], measure=(name, measure))
    ]


MORE_RPS = 16.0


def _more_load(
    lab: Lab, tuned: Tuned, skews: Sequence[int], loads: Mapping[int, Load]
) -> Comparison:
    """Where MuxServe serves all in time at either end, more of the same may tell them apart."""
    ends = [skews[0], skews[-1]]
    only = {"muxserve": SYSTEMS["muxserve"]}
    here, changed = (
        fall_of(
            compared_systems(
                lab, tuned, {f"{x}-at-{rate:g}": load for x, load in chosen}, None, only
            )[0],
            "muxserve",
        )
        for rate, chosen in (
            (RATE, [(n, loads[n]) for n in ends]),
            (MORE_RPS, [(n, replace(loads[n], rate_rps=MORE_RPS)) for n in ends]),
        )
    )
    at = f"at a skew of {ends[0]} and {ends[-1]}, {MORE_RPS:g} req/s"
    what = f"by what muxserve's SLO attainment falls with the skew, {at}"
    return findings.cause(what, here, changed)


STEADY_POINTS = 5.0


def _skewed(points: Points) -> list[Comparison]:
    source, found = "§6.3, Figure 12", lines(points, slo)
    values = {name: [v for _, v in line if v is not None] for name, line in found.items()}
    spans = {name: max(line) - min(line) for name, line in values.items() if line and name != FIXED}
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
            falls(found, name, "'s SLO attainment with the skew", source, SLIGHT_FALL)
            for name in BASELINES
        ),
    ]


def fig13(lab: Lab) -> Findings:
    rate = lab.pick(RATE / 2, 2.0)
    spreads = lab.pick((0.0, 2.0, 16.0), (0.0, 4.0))
    loads = {s: Load(rate, seconds_for(lab, rate), spread=s) for s in spreads}
    return _always_best(
        lab,
        tuned_systems(lab),
        loads,
        "§6.3, Figure 13",
        "spread of output lengths",
        more=_all_worse,
    )


def _all_worse(points: Points) -> list[Comparison]:
    what = "'s SLO attainment at a high variance of the output length"
    source, found = "§6.3, Figure 13", lines(points, slo)
    return [
        *(falls(found, name, what, source, WORSE) for name in ("seallm", *BASELINES)),
        *(
            shrinks(
                lines(points, measure),
                f"SeaLLM's benefit over the best baseline at a high variance, {name}",
                source,
                smaller=smaller,
            )
            for name, (measure, smaller) in MEASURES.items()
        ),
    ]


STUDIES = (
    study(
        "seallm-fig10",
        "SLO attainment by SLO scale",
        "Figure 10, §6.3",
        SETUP.replace("5 execution", "2 to 10 mean execution") + ", 8 req/s",
        fig10,
    ),
    study(
        "seallm-fig11",
        "Cluster density",
        "Figure 11, §6.3",
        SETUP.replace("on 8", "on 12, 8 and 4") + ", 8 req/s",
        fig11,
        fewer="; densities of 0.67, 1 and 2, without the paper's 0.5 (16 GPUs here)",
    ),
    study(
        "seallm-fig12",
        "Skew: consecutive requests of one service",
        "Figure 12, §6.3",
        SETUP + ", 8 req/s",
        fig12,
    ),
    study(
        "seallm-fig13",
        "Spread of output lengths around the profile",
        "Figure 13, §6.3",
        SETUP + ", 4 req/s; the profiled means are those of the lengths that come",
        fig13,
    ),
)
