"""SeaLLM's evaluation: Figures 6, 7, 10, 11, 12 and 13 (§6.2, §6.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from prism.studies import findings
from prism.studies.findings import Comparison, Findings, Plot
from prism.studies.lab import Lab
from prism.studies.prism_setup import problems, row
from prism.studies.seallm_lines import (
    BASELINES,
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
    shares_cause,
    tail_causes,
)
from prism.studies.seallm_setup import (
    FAIR,
    FIXED,
    SYSTEMS,
    Load,
    cluster,
    latency,
    mean_tpot_ms,
    mean_ttft_ms,
    slo,
    systems,
    tail_s,
    trace,
)
from prism.studies.study import Study

FAST = {name: system for name, system in SYSTEMS.items() if name != "alpaserve"}
RATES = (0.5, 3.0, 8.0, 12.5)
"""A quarter of the paper's 2 to 50 req/s, for a quarter of its GPUs."""
RATE = 8.0


def seconds_for(lab: Lab, rate_rps: float) -> float:
    """Arrivals come in bursts (CV 4): in half a minute they are another load each time."""
    return lab.pick(60.0, 5.0)


def compared_systems(
    lab: Lab,
    loads: Mapping[Any, Load],
    gpus: Mapping[Any, int] | None = None,
    systems_of: Mapping[str, tuple[str, str]] = SYSTEMS,
) -> tuple[Points, list[dict[str, Any]], list[str]]:
    """All systems under each load: (x -> system -> outcome, rows, what was not simulated)."""
    chosen = lab.pick(systems_of, FAST)
    trials = []
    for x, load in loads.items():
        setup = cluster(gpus[x]) if gpus else cluster()
        trials += systems(lab.setup(f"x{x}".replace(".", "-"), setup, trace(lab, load)), chosen)
    outcomes = iter(lab.run(trials, "systems"))
    found = {x: {name: next(outcomes) for name in chosen} for x in loads}
    table = [row(o, x=x, system=n) for x, by_name in found.items() for n, o in by_name.items()]
    every = [o for by_name in found.values() for o in by_name.values()]
    return found, table, problems(trials, every)


def by_rate(lab: Lab) -> tuple[Points, list[dict[str, Any]], list[str]]:
    rates = lab.pick(RATES, (1.0, 3.0))
    return compared_systems(lab, {r: Load(r, seconds_for(lab, r)) for r in rates})


PUBLISHED = {
    "normalised latency": {"vllm": 10.38, "alpaserve": 9.52, "muxserve": 13.60},
    "P99 latency": {"vllm": 12.13, "alpaserve": 5.80, "muxserve": 18.69},
    "SLO attainment": {"vllm": 1.82, "alpaserve": 3.64, "muxserve": 2.11},
}


def fig6(lab: Lab) -> Findings:
    points, table, remarks = by_rate(lab)
    source = "§6.2, Figure 6"
    measures: dict[str, tuple[Measure, bool]] = {
        "normalised latency": (latency, True),
        "P99 latency": (tail_s, True),
        "SLO attainment": (slo, False),
    }
    compared: list[Comparison] = []
    plots = {}
    for what, (measure, smaller) in measures.items():
        found = lines(points, measure)
        for name in BASELINES:
            best = most(found, name, smaller=smaller)
            said = PUBLISHED[what][name]
            compared.append(findings.factor(f"{what}, over {name}, up to", best, said, source))
            if name == "muxserve" and not compared[-1].agrees:
                compared.append(shares_cause(what, found, smaller=smaller))
        if measure is tail_s:
            over = [c for c in compared if c.what.startswith(f"{what}, over")]
            compared += tail_causes(points, over)
        plots[what.replace(" ", "-")] = Plot(what, "req/s", what, found, log=smaller)
    worst = [v for _, v in lines(points, latency)["seallm"] if v is not None]
    lowest = [v for _, v in lines(points, slo)["seallm"] if v is not None]
    compared += [
        findings.claim(
            "SeaLLM's normalised latency is below 3 at every rate",
            max(worst) < 3 if worst else None,
            f"{max(worst):.2f} at most" if worst else "-",
            "always",
            source,
        ),
        findings.claim(
            "SeaLLM's SLO attainment is above 90 % at every rate",
            min(lowest) > 90 if lowest else None,
            f"{min(lowest):.1f} % at least" if lowest else "-",
            "always",
            source,
        ),
    ]
    return Findings(compared, table, plots, [FAIR], remarks)


def fig7(lab: Lab) -> Findings:
    points, table, remarks = by_rate(lab)
    source = "§6.2, Figure 7"
    first, each = lines(points, mean_ttft_ms), lines(points, mean_tpot_ms)
    ratios = [most(first, name, smaller=True) for name in BASELINES]
    best = max((r for r in ratios if r is not None), default=None)
    mean = {name: _mean(values) for name, values in first.items()}
    slower = most(each, "alpaserve", smaller=True)
    compared = [
        findings.factor("mean TTFT, over any baseline, up to", best, 51.98, source),
        findings.order(
            "mean TTFT over the rates, SeaLLM least and MuxServe most",
            mean,
            ("seallm", "muxserve"),
            source,
            smaller=True,
        ),
        findings.factor("mean TPOT, over alpaserve, up to", slower, None, source),
    ]
    plots = {
        "ttft": Plot("Mean TTFT", "req/s", "ms", first, log=True),
        "tpot": Plot("Mean TPOT", "req/s", "ms", each, log=True),
    }
    return Findings(compared, table, plots, [FAIR], remarks)


def _mean(points: Sequence[tuple[Any, float | None]]) -> float | None:
    values = [v for _, v in points if v is not None]
    return sum(values) / len(values) if values else None


Judge = Callable[[Points], list[Comparison]]


def _always_best(
    lab: Lab,
    loads: Mapping[Any, Load],
    source: str,
    xlabel: str,
    *,
    gpus: Mapping[Any, int] | None = None,
    more: Judge = lambda points: [],
) -> Findings:
    """What Figures 10 to 13 say: SeaLLM is best at every x; and `more` that one of them says."""
    points, table, remarks = compared_systems(lab, loads, gpus)
    compared: list[Comparison] = []
    plots = {}
    for what, measure, smaller in (("SLO attainment", slo, False), ("latency", latency, True)):
        found = lines(points, measure)
        holds, shown = best_everywhere(found, smaller=smaller)
        name = "SLO attainment" if what != "latency" else "normalised latency"
        compared.append(
            findings.claim(f"SeaLLM's {name} is the best at every x", holds, shown, "all", source)
        )
        behind = list(dict.fromkeys(x for x, _ in ahead(found, smaller=smaller)))
        queues = lines(_with_queues(lab, {x: loads[x] for x in behind}, gpus), measure)
        compared += place_causes(f"{name}, {xlabel}", found, queues, smaller=smaller)
        compared += [
            findings.factor(
                f"{name}, over {other}, up to", most(found, other, smaller=smaller), None, source
            )
            for other in BASELINES
            if other in found
        ]
        if not compared[-1].agrees:  # over muxserve, the last of BASELINES
            compared.append(shares_cause(name, found, smaller=smaller))
        plots[what.replace(" ", "-")] = Plot(name, xlabel, name, found, log=smaller)
    return Findings([*compared, *more(points)], table, plots, [FAIR], remarks)


def _with_queues(lab: Lab, loads: Mapping[Any, Load], gpus: Mapping[Any, int] | None) -> Points:
    """SeaLLM with skip-join feedback queues (§6.3, "SeaLLM-M") under each load."""
    if not loads:
        return {None: {}}
    only = {"seallm": ("seallm", "M")}
    trials = []
    for x, load in loads.items():
        setup = cluster(gpus[x]) if gpus else cluster()
        trials += systems(lab.setup(f"x{x}".replace(".", "-"), setup, trace(lab, load)), only)
    outcomes = lab.run(trials, "feedback queues")
    return {x: {"seallm": found} for x, found in zip(loads, outcomes, strict=True)}


def fig10(lab: Lab) -> Findings:
    rate, scales = lab.pick(RATE, 2.0), lab.pick((2.0, 5.0, 10.0), (2.5, 5.0))
    seconds = seconds_for(lab, rate)
    loads = {s: Load(rate, seconds, slo_scale=s, slo_of_service=True) for s in scales}
    return _always_best(lab, loads, "§6.3, Figure 10", "SLO scale")


DENSITIES = {0.67: 12, 1.0: 8, 2.0: 4}


def fig11(lab: Lab) -> Findings:
    rate = lab.pick(RATE, 2.0)
    chosen = lab.pick(DENSITIES, {1.0: 8, 2.0: 4})
    loads = dict.fromkeys(chosen, Load(rate, seconds_for(lab, rate)))
    source, xlabel = "§6.3, Figure 11", "cluster density"
    return _always_best(lab, loads, source, xlabel, gpus=chosen, more=_crowded)


def _crowded(points: Points) -> list[Comparison]:
    source, found = "§6.3, Figure 11", lines(points, slo)
    gains = gains_of(found)
    largest = max(gains, key=lambda gain: gain[1], default=None)
    most_there = None if largest is None else largest[0] == gains[-1][0]
    left_out = list(points.values())[-1]["muxserve"]
    return [
        falls(points, "alpaserve", "'s SLO attainment with the cluster's density", source),
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
    found = _always_best(lab, loads, source, xlabel, more=_skewed)
    wrong = [c for c in found.comparisons if c.agrees is False and "muxserve" in c.what]
    if not wrong or lab.quick:
        return found
    return msgspec.structs.replace(
        found, comparisons=[*found.comparisons, *_more_load(lab, skews, loads)]
    )


MORE_RPS = 16.0


def _more_load(lab: Lab, skews: Sequence[int], loads: Mapping[int, Load]) -> list[Comparison]:
    """Where MuxServe serves all in time at either end, more of the same may tell them apart."""
    ends = [skews[0], skews[-1]]
    two = {"seallm": SYSTEMS["seallm"], "muxserve": SYSTEMS["muxserve"]}
    rows = []
    before, after = (
        compared_systems(lab, {f"{x}-at-{rate:g}": load for x, load in chosen}, None, two)[0]
        for rate, chosen in (
            (RATE, [(n, loads[n]) for n in ends]),
            (MORE_RPS, [(n, replace(loads[n], rate_rps=MORE_RPS)) for n in ends]),
        )
    )
    what = f"at a skew of {ends[0]} and {ends[-1]}, {MORE_RPS:g} req/s"
    here, changed = (most(lines(p, slo), "muxserve", smaller=False) for p in (before, after))
    rows.append(findings.cause(f"SLO attainment, over muxserve, {what}", here, changed))
    here, changed = (fall_of(p, "muxserve") for p in (before, after))
    said = f"by what muxserve's SLO attainment falls with the skew, {what}"
    rows.append(findings.cause(said, here, changed))
    return rows


def _skewed(points: Points) -> list[Comparison]:
    source, found = "§6.3, Figure 12", lines(points, slo)
    values = {name: [v for _, v in line if v is not None] for name, line in found.items()}
    spans = {name: max(line) - min(line) for name, line in values.items() if line and name != FIXED}
    steady = "SeaLLM's SLO attainment changes least with the skew"
    return [
        findings.claim(
            steady,
            spans["seallm"] <= min(spans.values()) + 100 * findings.EQUAL if spans else None,
            ", ".join(f"{name} by {span:.1f} points" for name, span in spans.items()),
            "does not fluctuate much",
            source,
        ),
        *(falls(points, name, "'s SLO attainment with the skew", source) for name in BASELINES),
    ]


def fig13(lab: Lab) -> Findings:
    rate = lab.pick(RATE / 2, 2.0)
    spreads = lab.pick((0.0, 2.0, 16.0), (0.0, 4.0))
    loads = {s: Load(rate, seconds_for(lab, rate), spread=s) for s in spreads}
    return _always_best(lab, loads, "§6.3, Figure 13", "spread of output lengths", more=_all_worse)


def _all_worse(points: Points) -> list[Comparison]:
    what = "'s SLO attainment at a high variance of the output length"
    return [falls(points, name, what, "§6.3, Figure 13") for name in ("seallm", *BASELINES)]


SETUP = (
    "5 services (Llama-2 7B, 13B, 70B at TP 4, OPT-6.7B; ShareGPT's and LongBench's mean lengths) "
    "on 8 A100-80G, SLO of 5 execution times"
)
SMALLER = "a quarter of the paper's GPUs and rates, 60 s"
DIFFERS = (
    "Azure Functions' arrivals are Gamma gaps with a CV of 4 unless --traces holds the file. A "
    "step's cost is that of an engine with continuous batching on a roofline A100, and MuxServe "
    "runs on the same engine as SeaLLM rather than on its own code of 2024, so that only what is "
    "scheduled and placed differs. SeaLLM would look for a new placement after 60 s, which is as "
    "long as a trace; the paper's first interval is not stated, and decision 169 has what shorter "
    "ones did."
)


def _study(name: str, title: str, figure: str, setup: str, run: Callable[[Lab], Findings]) -> Study:
    return Study(name, title, f"SeaLLM, {figure}", setup, SMALLER, DIFFERS, run)


STUDIES = (
    _study(
        "seallm-fig6",
        "Normalised latency, tail latency and SLO attainment by rate",
        "Figure 6, §6.2",
        SETUP + ", 0.5 to 12.5 req/s",
        fig6,
    ),
    _study(
        "seallm-fig7",
        "Mean TTFT and TPOT by rate",
        "Figure 7, §6.2",
        SETUP + ", 0.5 to 12.5 req/s",
        fig7,
    ),
    _study(
        "seallm-fig10",
        "SLO attainment by SLO scale",
        "Figure 10, §6.3",
        SETUP.replace("5 execution", "2 to 10 mean execution") + ", 8 req/s",
        fig10,
    ),
    _study(
        "seallm-fig11",
        "Cluster density",
        "Figure 11, §6.3",
        SETUP.replace("on 8", "on 12, 8 and 4") + ", 8 req/s",
        fig11,
    ),
    _study(
        "seallm-fig12",
        "Skew: consecutive requests of one service",
        "Figure 12, §6.3",
        SETUP + ", 8 req/s",
        fig12,
    ),
    _study(
        "seallm-fig13",
        "Spread of output lengths around the profile",
        "Figure 13, §6.3",
        SETUP + ", 4 req/s; the profiled means are those of the lengths that come",
        fig13,
    ),
)
