"""SeaLLM's end-to-end results, ablation and overhead: Figures 6, 7, 8 and 14 (§6.2 to §6.4)."""

from __future__ import annotations

import time
from pathlib import Path

from lab.papers.seallm import seallm_setup as services
from lab.papers.seallm import seallm_statements as statements
from lab.papers.study import findings
from lab.papers.study.a100 import slo
from lab.papers.study.findings import Findings, Plot, Statement
from lab.papers.study.lab import Lab
from lab.papers.study.lines import Lines, Measure, Points, lines, mean, study_of
from lab.papers.study.tuning import Tuned, simulated
from prism_sim.cluster.world import World
from prism_sim.scenario.scenario import load

RATES = (0.5, 3.0, 8.0, 12.5)
"""A quarter of the paper's 2 to 50 req/s, for a quarter of its GPUs."""
RATE = 8.0
PUBLISHED = {
    "normalised latency": {"vllm": 10.38, "alpaserve": 9.52, "muxserve": 13.60},
    "P99 latency": {"vllm": 12.13, "alpaserve": 5.80, "muxserve": 18.69},
    "SLO attainment": {"vllm": 1.82, "alpaserve": 3.64, "muxserve": 2.11},
}
FIGURE_6: dict[str, tuple[Measure, bool]] = {
    "normalised latency": services.LATENCY,
    "P99 latency": (services.tail_s, True),
    "SLO attainment": services.ATTAINMENT,
}
"""Name -> (measure, whether smaller figures are better)."""


def by_rate(lab: Lab, tuned: Tuned) -> Points:
    rates = lab.pick(RATES, (1.0, 3.0))
    return services.under_loads(
        lab, tuned, {r: services.ServiceLoad(r, services.seconds_for(lab)) for r in rates}
    )


def fig6(lab: Lab) -> Findings:
    tuned = services.tuned_systems(lab)
    points, source = by_rate(lab, tuned), "§6.2, Figure 6"
    compared: list[Statement] = []
    plots = {}
    for what, (measure, smaller) in FIGURE_6.items():
        found = lines(points, measure)
        for name in statements.BASELINES:
            best, said = statements.most(found, name, smaller=smaller), PUBLISHED[what][name]
            made = findings.factor(f"{what}, over {name}, up to", best, said, source)
            compared.append(made)
            if name == "muxserve" and not made.agrees:
                compared.append(statements.shares_cause(what, found, smaller=smaller))
            if measure is services.tail_s and made.agrees is False:
                compared.append(statements.tail_cause(points, name))
        plots[what.replace(" ", "-")] = Plot(what, "req/s", what, found, log=smaller)
    worst, lowest = (
        [v for _, v in lines(points, m)["seallm"] if v is not None] for m in (services.latency, slo)
    )
    compared += [
        findings.claim(
            "SeaLLM's normalised latency is below 3 at every rate",
            max(worst) < 3 if worst else None,
            {"at most": max(worst, default=None)},
            "always",
            source,
        ),
        findings.claim(
            "SeaLLM's SLO attainment is above 90 % at every rate",
            min(lowest) > 90 if lowest else None,
            {"% at least": min(lowest, default=None)},
            "always",
            source,
        ),
    ]
    return study_of(points, compared, plots, [services.FAIR_TUNED, *tuned.log])


PUBLISHED_TTFT = 51.98
"""Maximum factor in TTFT over any baseline (§6.2)."""


def fig7(lab: Lab) -> Findings:
    tuned = services.tuned_systems(lab)
    points, source = by_rate(lab, tuned), "§6.2, Figure 7"
    first, each = lines(points, services.mean_ttft_ms), lines(points, services.mean_tpot_ms)
    ratios = [statements.most(first, name, smaller=True) for name in statements.BASELINES]
    best = max((r for r in ratios if r is not None), default=None)
    compared = [
        findings.factor("mean TTFT, over any baseline, up to", best, PUBLISHED_TTFT, source),
        worst_of(first, source),
        statements.faster(each, "alpaserve", "mean TPOT, over alpaserve", "always faster", source),
    ]
    for name in ("muxserve", "vllm"):
        what = f"SeaLLM's mean TPOT is similar to {name}'s"
        compared.append(statements.similar(each, name, what, source))
    plots = {
        "ttft": Plot("Mean TTFT", "req/s", "ms", first, log=True),
        "tpot": Plot("Mean TPOT", "req/s", "ms", each, log=True),
    }
    return study_of(points, compared, plots, [services.FAIR_TUNED, *tuned.log])


def worst_of(first: Lines, source: str) -> Statement:
    """Compares "the Avg TTFT of MuxServe is the worst".

    The paper does not state a rate; ours is the mean over the rates.
    """
    means = {name: mean(line) for name, line in first.items() if name != services.FIXED}
    known = {name: v for name, v in means.items() if v is not None}
    what = "mean TTFT over the rates, MuxServe's is the worst"
    return findings.best(what, "muxserve", known, "the worst", source, unit="ms")


# --- Figure 8 ------------------------------------------------------------------------------

REMOVED = {
    "F": "first come first served",
    "M": "skip-join feedback queues",
    "P": "no sharing",
    "A": "no adaptive replacement",
}
"""Variant -> its replacement for a part of SeaLLM."""
VARIANTS = {"seallm": ("seallm", ""), **{name: ("seallm", name) for name in REMOVED}}
REPLACEMENT = "60s"
"""First replacement interval, short enough for a replacement within 90 s."""
PUBLISHED_PARTS = {("F", "M"): (4.17, 1.37), ("A",): (2.44, 1.33)}
"""Variants -> maximum factors in normalised latency and SLO attainment. F and M share one figure.
The text has no figure for P, which is "degraded to vLLM", as it is here by construction."""


def fig8(lab: Lab) -> Findings:
    setup = {**services.cluster(), "scheduler": {"search_interval": REPLACEMENT}}
    setups: dict[float, str] = {}
    for rate in lab.pick((2.0, 5.0, 12.5), (1.0, 3.0)):
        work = services.trace(lab, services.ServiceLoad(rate, lab.pick(90.0, 5.0)))
        setups[rate] = lab.setup(f"rate{rate:g}".replace(".", "-"), setup, work)
    points = simulated(lab, setups, VARIANTS)
    times, shares = lines(points, services.latency), lines(points, slo)
    compared: list[Statement] = []
    measures = (("normalised latency", times, True), ("SLO attainment", shares, False))
    for measure, found, smaller in measures:
        compared += _without(measure, found, smaller)
    plots = {
        "latency": Plot("Normalised latency", "req/s", "normalised latency", times, log=True),
        "slo": Plot("SLO attainment", "req/s", "%", shares),
    }
    budget = [services.FAIR, f"In this study it is after {REPLACEMENT}, which is within the trace"]
    return study_of(points, compared, plots, budget)


def _without(measure: str, found: Lines, smaller: bool) -> list[Statement]:
    """Compares SeaLLM with its variants in one measure."""
    source, compared = "§6.3, Figure 8", []
    over = {name: statements.most(found, name, smaller=smaller) for name in REMOVED}

    def what(*names: str) -> str:
        removed = " or ".join(REMOVED[name] for name in names)
        return f"without its part: {removed}: {measure}, up to"

    for names, published in PUBLISHED_PARTS.items():
        known = [r for name in names if (r := over[name]) is not None]
        said = published[0] if smaller else published[1]
        compared.append(findings.factor(what(*names), max(known, default=None), said, source))
        if len(names) > 1:
            compared += [findings.factor(what(n), over[n], None, source) for n in names]
    return [*compared, findings.unpublished(what("P"), over["P"], source)]


def fig14(lab: Lab) -> Findings:
    """Runs Figure 14, CPU times: the only study with figures that depend on the machine."""
    sizes, times = lab.pick((4, 8, 16), (4, 8)), []
    work = services.trace(lab, services.ServiceLoad(lab.pick(RATE, 2.0), services.seconds_for(lab)))
    with lab.bar("searches") as progress:
        for number, gpus in enumerate(sizes):
            config = Path(lab.setup(f"gpus{gpus}", services.cluster(gpus), work))
            scenario = load(config, {"policy": "seallm"})
            world = World(scenario.setup, scenario.work)
            since_s = time.process_time()
            world.place()
            times.append((gpus, time.process_time() - since_s))
            progress(number + 1, len(sizes))
    longest = max(seconds for _, seconds in times)
    compared = [
        findings.claim(
            "the placement search takes less than a minute",
            longest < 60,
            {f"s on one core for {sizes[-1]} GPUs": longest},
            "under 60 s with up to 8 processes",
            "§6.4, Figure 14",
        )
    ]
    table = [{"gpus": gpus, "search_cpu_s": seconds} for gpus, seconds in times]
    plots = {"time": Plot("Placement search", "GPUs", "CPU seconds", {"seallm": list(times)})}
    return Findings(compared, table, plots, [services.FAIR])
