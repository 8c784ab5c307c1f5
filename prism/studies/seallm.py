"""SeaLLM's end-to-end results: Figures 6 and 7 (§6.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from prism.studies import findings
from prism.studies.findings import Comparison, Findings, Plot
from prism.studies.lab import Lab
from prism.studies.prism_setup import problems, row
from prism.studies.seallm_lines import (
    BASELINES,
    Lines,
    Measure,
    Points,
    ahead,
    faster,
    lines,
    most,
    ratio_at,
    shares_cause,
    similar,
    tail_cause,
)
from prism.studies.seallm_setup import (
    FAIR_TUNED,
    FAST,
    FIXED,
    SYSTEMS,
    Load,
    cluster,
    latency,
    mean_tpot_ms,
    mean_ttft_ms,
    slo,
    tail_s,
    trace,
    tuned_systems,
)
from prism.studies.study import Study
from prism.studies.tuning import Systems, Tuned

RATES = (0.5, 3.0, 8.0, 12.5)
"""A quarter of the paper's 2 to 50 req/s, for a quarter of its GPUs."""
RATE = 8.0


def seconds_for(lab: Lab, rate_rps: float) -> float:
    """Arrivals come in bursts (CV 4): in half a minute they are another load each time."""
    return lab.pick(60.0, 5.0)


def compared_systems(
    lab: Lab,
    tuned: Tuned,
    loads: Mapping[Any, Load],
    gpus: Mapping[Any, int] | None = None,
    systems: Systems | None = None,
) -> tuple[Points, list[dict[str, Any]], list[str]]:
    """systems (all of the study) under each load: (x -> system -> outcome, rows, what was not
    simulated)."""
    chosen = systems or lab.pick(SYSTEMS, FAST)
    trials = []
    for x, load in loads.items():
        setup = cluster(gpus[x]) if gpus else cluster()
        config = lab.setup(f"x{x}".replace(".", "-"), setup, trace(lab, load))
        trials += tuned.trials(config, chosen)
    outcomes = iter(lab.run(trials, "systems"))
    found = {x: {name: next(outcomes) for name in chosen} for x in loads}
    table = [row(o, x=x, system=n) for x, by_name in found.items() for n, o in by_name.items()]
    every = [o for by_name in found.values() for o in by_name.values()]
    return found, table, problems(trials, every)


OTHER_TRACES = 2


def elsewhere(
    lab: Lab,
    tuned: Tuned,
    found: Lines,
    place: tuple[Any, str],
    load: Load,
    *,
    measure: tuple[str, Measure],
) -> list[Comparison]:
    """Is it this trace that has a baseline before SeaLLM, in a measure of which the smaller is
    better: means of others of the same load. place: x and the baseline."""
    (x, name), (said, value) = place, measure
    if lab.quick:
        return []
    only = {system: SYSTEMS[system] for system in ("seallm", name)}
    trials = []
    for number in range(OTHER_TRACES):
        work = trace(replace(lab, seed=lab.seed + number + 1), load)
        config = lab.setup(f"x{x}-other{number}".replace(".", "-"), cluster(), work)
        trials += tuned.trials(config, only)
    values = [value(outcome) or 0.0 for outcome in lab.run(trials, "other traces")]
    here = ratio_at(found, x, "seallm", name, smaller=True)
    changed = findings.ratio(sum(values[1::2]), sum(values[::2]))
    what = f"{said} at {x:g}, over {name}, on {OTHER_TRACES} other traces"
    return [findings.cause(what, here, changed, wanted=1 - findings.EQUAL)]


def by_rate(lab: Lab, tuned: Tuned) -> tuple[Points, list[dict[str, Any]], list[str]]:
    rates = lab.pick(RATES, (1.0, 3.0))
    return compared_systems(lab, tuned, {r: Load(r, seconds_for(lab, r)) for r in rates})


PUBLISHED = {
    "normalised latency": {"vllm": 10.38, "alpaserve": 9.52, "muxserve": 13.60},
    "P99 latency": {"vllm": 12.13, "alpaserve": 5.80, "muxserve": 18.69},
    "SLO attainment": {"vllm": 1.82, "alpaserve": 3.64, "muxserve": 2.11},
}


def fig6(lab: Lab) -> Findings:
    tuned = tuned_systems(lab)
    points, table, remarks = by_rate(lab, tuned)
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
            made = findings.factor(f"{what}, over {name}, up to", best, said, source)
            compared.append(made)
            if name == "muxserve" and not made.agrees:
                compared.append(shares_cause(what, found, smaller=smaller))
            if measure is tail_s and made.agrees is False:
                compared.append(tail_cause(points, name))
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
    return Findings(compared, table, plots, [FAIR_TUNED, *tuned.said], remarks)


PUBLISHED_TTFT = 51.98
"""Up to, over any baseline (§6.2)."""


def fig7(lab: Lab) -> Findings:
    tuned = tuned_systems(lab)
    points, table, remarks = by_rate(lab, tuned)
    source = "§6.2, Figure 7"
    first, each = lines(points, mean_ttft_ms), lines(points, mean_tpot_ms)
    ratios = [most(first, name, smaller=True) for name in BASELINES]
    best = max((r for r in ratios if r is not None), default=None)
    compared = [
        findings.factor("mean TTFT, over any baseline, up to", best, PUBLISHED_TTFT, source),
        worst_of(first, source),
        faster(each, "alpaserve", "mean TPOT, over alpaserve", "always faster", source),
        *(
            made
            for x, name in ahead(each, smaller=True)
            if name == "alpaserve"
            for made in elsewhere(
                lab,
                tuned,
                each,
                (x, name),
                Load(x, seconds_for(lab, x)),
                measure=("mean TPOT", mean_tpot_ms),
            )
        ),
        *(
            similar(each, name, f"SeaLLM's mean TPOT is similar to {name}'s", source)
            for name in ("muxserve", "vllm")
        ),
    ]
    plots = {
        "ttft": Plot("Mean TTFT", "req/s", "ms", first, log=True),
        "tpot": Plot("Mean TPOT", "req/s", "ms", each, log=True),
    }
    return Findings(compared, table, plots, [FAIR_TUNED, *tuned.said], remarks)


def worst_of(first: Lines, source: str) -> Comparison:
    """ "The Avg TTFT of MuxServe is the worst"; of no rate in particular, so that ours is the mean
    over the rates."""
    means = {name: _mean(values) for name, values in first.items() if name != FIXED}
    known = {name: v for name, v in means.items() if v is not None}
    what = "mean TTFT over the rates, MuxServe's is the worst"
    shown = ", ".join(f"{name} {v:.4g} ms" for name, v in known.items())
    if "muxserve" not in known:
        return findings.claim(what, None, shown or "-", "the worst", source)
    return findings.best(what, "muxserve", known, "the worst", source, shown=shown)


def _mean(points: Sequence[tuple[Any, float | None]]) -> float | None:
    values = [v for _, v in points if v is not None]
    return sum(values) / len(values) if values else None


SETUP = (
    "5 services (Llama-2 7B, 13B, 70B at TP 4, OPT-6.7B; ShareGPT's and LongBench's mean lengths) "
    "on 8 A100-80G, SLO of 5 execution times"
)
SMALLER = "a quarter of the paper's GPUs and rates, 60 s"
DIFFERS = (
    "Azure Functions' arrivals are Gamma gaps with a CV of 4 unless --traces holds the file. A "
    "step's cost is that of an engine with continuous batching on a roofline A100, and MuxServe "
    "runs on the same engine as SeaLLM rather than on its own code of 2024, so that only what is "
    "scheduled and placed differs. The paper does not state the first interval of SeaLLM's "
    "replacement. Its GPUs are A800s (§6.1), which are A100s with a slower NVLink; ours are "
    "A100s. It gives vLLM's services equal numbers of GPUs (§6.1); here each has the fewest that "
    "hold it, and the rest go by computation, as equal parts of 8 GPUs hold no 70B service."
)


def study(
    name: str,
    title: str,
    figure: str,
    setup: str,
    run: Callable[[Lab], Findings],
    *,
    fewer: str = "",
    read: str = "",
) -> Study:
    """fewer: what is left out of this figure. read: how its words are read."""
    return Study(name, title, f"SeaLLM, {figure}", setup, SMALLER + fewer, DIFFERS + read, run)


STUDIES = (
    study(
        "seallm-fig6",
        "Normalised latency, tail latency and SLO attainment by rate",
        "Figure 6, §6.2",
        SETUP + ", 0.5 to 12.5 req/s",
        fig6,
    ),
    study(
        "seallm-fig7",
        "Mean TTFT and TPOT by rate",
        "Figure 7, §6.2",
        SETUP + ", 0.5 to 12.5 req/s",
        fig7,
    ),
)
