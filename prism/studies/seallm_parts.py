"""SeaLLM's ablation and overhead: Figures 8 and 14 (§6.3, §6.4)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from prism.sim.scenario import load
from prism.sim.world import World
from prism.studies import findings
from prism.studies.findings import Comparison, Findings, Plot
from prism.studies.lab import Lab
from prism.studies.prism_setup import problems, row
from prism.studies.seallm import DIFFERS, RATE, SETUP, SMALLER, seconds_for
from prism.studies.seallm_lines import Lines, lines, most
from prism.studies.seallm_setup import FAIR, Load, cluster, latency, slo, trace
from prism.studies.study import Study
from prism.studies.trial import Measured, Trial

VARIANTS = {"seallm": "", "F": "F", "M": "M", "P": "P", "A": "A"}
SAID = {
    "F": "first come first served",
    "M": "skip-join feedback queues",
    "P": "no sharing",
    "A": "no adaptive replacement",
}
REPLACEMENT = "60s"
"""The first interval, so that there is a replacement within 90 s."""
PUBLISHED = {("F", "M"): (4.17, 1.37), ("A",): (2.44, 1.33)}
"""Normalised latency and SLO attainment, up to; F and M have one figure for both. Of P the text has
none: it is "degraded to vLLM", which it is here by construction."""


def fig8(lab: Lab) -> Findings:
    rates = lab.pick((2.0, 5.0, 12.5), (1.0, 3.0))
    chosen = list(VARIANTS)
    trials: list[Trial] = []
    for rate in rates:
        work = trace(lab, Load(rate, lab.pick(90.0, 5.0)))
        setup = {**cluster(), "replacement_interval": REPLACEMENT}
        config = lab.setup(f"rate{rate:g}".replace(".", "-"), setup, work)
        trials += [Trial(config, {"policy": "seallm"}, variant=VARIANTS[n]) for n in chosen]
    outcomes = lab.run(trials, "variants")
    flat = iter(outcomes)
    points = {rate: {name: next(flat) for name in chosen} for rate in rates}
    times, shares = lines(points, latency), lines(points, slo)
    compared: list[Comparison] = []
    drifted: dict[str, list[Measured]] = {}
    for measure, found, smaller in (
        ("normalised latency", times, True),
        ("SLO attainment", shares, False),
    ):
        compared += _without(measure, found, smaller)
        made = f"{SAID['A']}: {measure}"
        over = most(found, "A", smaller=smaller)
        if over is not None and over <= 1 + findings.EQUAL:
            drifted = drifted or _where_rates_drift(lab)
            compared.append(drift_cause(made, over, drifted, smaller=smaller))
    plots = {
        "latency": Plot("Normalised latency", "req/s", "normalised latency", times, log=True),
        "slo": Plot("SLO attainment", "req/s", "%", shares),
    }
    table = [row(o, x=x, system=n) for x, by_name in points.items() for n, o in by_name.items()]
    budget = [FAIR, f"Here it comes after {REPLACEMENT}, so that one is within the trace"]
    return Findings(compared, table, plots, budget, problems(trials, outcomes))


def _without(measure: str, found: Lines, smaller: bool) -> list[Comparison]:
    """SeaLLM over its variants in one measure; smaller: is better."""
    source, compared = "§6.3, Figure 8", []
    over = {name: most(found, name, smaller=smaller) for name in SAID}
    for names, published in PUBLISHED.items():
        said = published[0] if smaller else published[1]
        known = [r for name in names if (r := over[name]) is not None]
        what = " or ".join(SAID[name] for name in names)
        what = f"without its part: {what}: {measure}, up to"
        compared.append(findings.factor(what, max(known, default=None), said, source))
        if len(names) > 1:
            each = (f"without its part: {SAID[name]}: {measure}, up to" for name in names)
            compared += [
                findings.factor(what, over[name], None, source)
                for what, name in zip(each, names, strict=True)
            ]
    what = f"without its part: {SAID['P']}: {measure}, up to"
    return [*compared, findings.unsaid(what, over["P"], source)]


# --- what replacement is for ---------------------------------------------------------------

DRIFT_RPS = 16.0
DRIFT_TRACES = 2
DRIFT_INTERVAL = "15s"
DRIFT = (
    f"where another service becomes the popular one: {DRIFT_RPS:g} req/s without bursts, first "
    f"placed by the time before, first interval {DRIFT_INTERVAL}, means of {DRIFT_TRACES} traces"
)


def _where_rates_drift(lab: Lab) -> dict[str, list[Measured]]:
    """SeaLLM with replacement and without, on rates that change once and then stay."""
    trials: list[Trial] = []
    load = Load(lab.pick(DRIFT_RPS, 3.0), lab.pick(90.0, 5.0), gap_cv=1.0)
    setup = {**cluster(), "replacement_interval": DRIFT_INTERVAL}
    for number in range(DRIFT_TRACES):
        now, then = (replace(lab, seed=lab.seed + number + more) for more in (0, 500))
        work = trace(now, replace(load, popular="chat-13b"))
        config = lab.setup(f"drift{number}", setup, work)
        past = lab.history(f"drift{number}", trace(then, replace(load, popular="chat-7b")))
        trials += [
            Trial(config, {"policy": "seallm"}, variant=VARIANTS[name], history=past)
            for name in ("seallm", "A")
        ]
    outcomes = lab.run(trials, "drifting rates")
    return {"seallm": outcomes[::2], "A": outcomes[1::2]}


def drift_cause(
    what: str, here: float | None, drifted: Mapping[str, Sequence[Measured]], *, smaller: bool
) -> Comparison:
    """Whether replacement gains where there is something to adapt to. smaller: is better."""
    measure = latency if smaller else slo
    with_it, without = (sum(measure(m) or 0.0 for m in drifted[n]) for n in ("seallm", "A"))
    changed = findings.ratio(without, with_it) if smaller else findings.ratio(with_it, without)
    return findings.cause(f"{what}, {DRIFT}", here, changed)


def fig14(lab: Lab) -> Findings:
    """Wall-clock times: the one study whose figures depend on the machine."""
    sizes = lab.pick((4, 8, 16), (4, 8))
    rate = lab.pick(RATE, 2.0)
    work = trace(lab, Load(rate, seconds_for(lab, rate)))
    table, times = [], []
    with lab.bar("searches") as progress:
        for number, gpus in enumerate(sizes):
            scenario = load(
                Path(lab.setup(f"gpus{gpus}", cluster(gpus), work)), {"policy": "seallm"}
            )
            world = World(scenario.setup, scenario.work)
            since_s = time.process_time()
            world.place()
            times.append((gpus, time.process_time() - since_s))
            table.append({"gpus": gpus, "search_cpu_s": times[-1][1]})
            progress(number + 1, len(sizes))
    longest = max(seconds for _, seconds in times)
    compared = [
        findings.claim(
            "the placement search takes less than a minute",
            longest < 60,
            f"{longest:.1f} s on one core for {sizes[-1]} GPUs",
            "under 60 s with up to 8 processes",
            "§6.4, Figure 14",
        )
    ]
    plots = {"time": Plot("Placement search", "GPUs", "CPU seconds", {"seallm": list(times)})}
    return Findings(compared, table, plots, [FAIR])


STUDIES = (
    Study(
        "seallm-fig8",
        "SeaLLM without each of its parts",
        "SeaLLM, Figure 8, §6.3",
        SETUP + ", 2 to 12.5 req/s",
        SMALLER.replace("60 s", "90 s"),
        DIFFERS + " Without the file, no service's rate changes in the long run, so that there is "
        "nothing for a later placement to adapt to; an ablation has rates that change once. Where "
        "bursts hide such a change, a placement made for the last 15 to 30 s gains nothing "
        "(decision 205). "
        'SeaLLM-P is our dedicated system: that it "is degraded to '
        'vLLM" (§6.3) holds by construction and is not counted; its factors are not in the text.',
        fig8,
    ),
    Study(
        "seallm-fig14",
        "Running time of the placement search",
        "SeaLLM, Figure 14, §6.4",
        SETUP.replace("on 8", "on 4 to 16") + ", 8 req/s",
        "5 services, up to 16 GPUs, one process, 480 simulated requests, all of the trace's",
        "A search is as many simulations as the cluster has homes for services; these are in "
        "Python and are given all requests of a minute; the paper does not state how many.",
        fig14,
    ),
)
