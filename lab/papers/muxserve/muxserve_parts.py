"""MuxServe's ablations: Figures 8, 9 and 10 (§4.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.papers.muxserve import muxserve_setup as setup
from lab.papers.muxserve.muxserve_overall import RPS, SLO
from lab.papers.study import findings
from lab.papers.study.a100 import slo
from lab.papers.study.findings import Findings, Plot, Statement
from lab.papers.study.lab import Lab
from lab.papers.study.lines import (
    Lines,
    Points,
    best_ratio,
    cut,
    lines,
    outcomes,
    problems,
    rows,
    study_of,
)
from lab.papers.study.trial import TrialOutcome
from lab.papers.study.tuning import Systems, simulated
from prism_replay.lengths import SHAREGPT

LESS_MEMORY = "48GB"
"""Memory of a GPU in ablations."""
TIGHT = {"gpus.memory": LESS_MEMORY}


def variants(names: Mapping[str, str]) -> Systems:
    """Returns systems that are variants of MuxServe, from name -> variant."""
    return {name: ("muxserve", variant) for name, variant in names.items()}


# --- Figure 8 ------------------------------------------------------------------------------

SCALES = {
    "8 GPUs, 4 models": (8, (7, 7, 30, 13)),
    "16 GPUs, 7 models": (16, (7, 13, 7, 30, 13, 30, 65)),
}
"""Label -> (number of GPUs, sizes of the models in B)."""
PUBLISHED_GREEDY = {"16 GPUs, 7 models": 1.3}
"""Factor in throughput over the greedy placement, "in the right subfigure": read as this one."""
RATES_RPS = (24.0, 48.0, 96.0)
PLACED = variants({"muxserve": "", "greedy": "greedy"})


def placement(lab: Lab) -> Findings:
    """Runs Figure 8. Half of the models get 70 % of the requests.

    The rate is not published, so it is varied.
    """
    found: dict[str, Lines] = {}
    table, remarks, plots = [], [], {}
    for label, (gpus, sizes) in SCALES.items():
        half = len(sizes) // 2
        shares = [0.7 / half] * half + [0.3 / (len(sizes) - half)] * (len(sizes) - half)
        models = setup.models_of([f"llama-{size}b" for size in sizes], shares)
        setups: dict[float, str] = {}
        for rate in lab.pick(RATES_RPS, (2.0,)):
            trace = setup.drawn_by_share(lab, models, rate, lab.pick(30.0, 15.0))
            setups[rate] = lab.setup(f"{gpus}-gpus-{rate:g}", setup.cluster(models, gpus), trace)
        points = simulated(lab, setups, PLACED)
        found[label] = lines(points, setup.throughput)
        table += rows(points, cluster=label)
        remarks += problems(outcomes(points))
        plots[f"throughput-{gpus}"] = Plot(label, "req/s", RPS, found[label])
        plots[f"slo-{gpus}"] = Plot(label, "req/s", SLO, lines(points, slo))
    return Findings(_placed(found), table, plots, [setup.FAIR], remarks)


def _placed(found: Mapping[str, Lines]) -> list[Statement]:
    source, compared = "§4.4, Figure 8", []
    for label, rates in found.items():
        best, said = best_ratio(rates, "muxserve", "greedy"), PUBLISHED_GREEDY.get(label)
        what = f"{label}: throughput over the greedy placement, at the best rate"
        made = findings.factor(what, best, said, source)
        compared.append(made if said else findings.unpublished(what, best, source))
    return compared


# --- Figure 9 ------------------------------------------------------------------------------

STAGES = variants({"neither": "temporal", "+ compute": "own-kv", "+ memory": ""})
PUBLISHED_PARTS = {"compute": 1.7, "memory": 1.2, "memory, SLO attainment": 3.6}
"""Part -> factor in throughput, or in SLO attainment (§4.4)."""


def manager(lab: Lab) -> Findings:
    """Runs Figure 9: the unified resource manager for compute, then for memory as well.

    The rate is not published, so it is varied.
    """
    models = setup.models_of(["llama-7b", "llama-13b", "llama-7b", "llama-30b"])
    alphas, rates_rps = lab.pick((0.7, 1.3, 2.1), (0.9,)), lab.pick((16.0, 32.0), (1.0,))
    setups: dict[str, str] = {}
    for rate in rates_rps:
        for alpha in alphas:
            trace = setup.power_law(lab, models, rate, alpha, lab.pick(40.0, 8.0))
            name = f"alpha{alpha:g}-rate{rate:g}".replace(".", "-")
            label = f"alpha {alpha:g}, {rate:g} req/s"
            setups[label] = lab.setup(name, setup.cluster(models, 4), trace)
    points = simulated(lab, setups, STAGES)
    lowest = dict(list(setups.items())[: len(alphas)])
    less = simulated(lab, lowest, STAGES, changes=TIGHT)
    found, small = ((lines(each, setup.throughput), lines(each, slo)) for each in (points, less))
    plots = {
        name: Plot("Resource manager", "", ylabel, each, bars=True)
        for name, ylabel, each in zip(("throughput", "slo"), (RPS, SLO), found, strict=True)
    }
    return study_of(points, _managed(found, small), plots, [setup.FAIR])


def _managed(found: tuple[Lines, Lines], small: tuple[Lines, Lines]) -> list[Statement]:
    """Compares the parts of the manager. `small` has the lines with less memory."""
    source, said = "§4.4, Figure 9", PUBLISHED_PARTS
    best = best_ratio(found[0], "+ compute", "neither")
    what = "throughput, + compute over neither, at the best point"
    compared = [findings.factor(what, best, said["compute"], source)]
    parts = (("throughput", "memory"), ("SLO attainment", "memory, SLO attainment"))
    for (measure, part), whole, less in zip(parts, found, small, strict=True):
        best = best_ratio(whole, "+ memory", "+ compute")
        what = f"{measure}, + memory over + compute"
        compared.append(findings.factor(f"{what}, at the best point", best, said[part], source))
        if compared[-1].agrees is False:
            same = cut(whole, {x for x, _ in less["+ memory"]})
            here, changed = (best_ratio(each, "+ memory", "+ compute") for each in (same, less))
            tight = f"{what}, {LESS_MEMORY} a GPU, at the lowest rate"
            compared.append(findings.cause(tight, here, changed))
    return compared


# --- Figure 10 -----------------------------------------------------------------------------

UNITS = {
    "a": (("llama-30b", 2, 2.0), ("llama-13b", 8, 1.0), ("llama-7b", 8, 1.0)),
    "b": (("llama-65b", 1, 4.0), ("llama-30b", 8, 1.0)),
}
"""Unit -> (model, requests per second, factor of the lengths) of each model (§4.4)."""
PUBLISHED_RPS = {
    "a": {"adbs": 6.2, "round-robin": 4.1, "fcfs": 3.8},
    "b": {"adbs": 6.6, "round-robin": 4.9, "fcfs": 3.2},
}
ORDERS = variants({"adbs": "unit", "round-robin": "unit-rr", "fcfs": "unit-fcfs"})
Orders = Mapping[str, TrialOutcome]


def scheduling(lab: Lab) -> Findings:
    """Runs Figure 10.

    Long runs fill KV memory in unit b. In unit a they do not, so it also runs with less memory.
    """
    short = {u: _unit(lab, u, lab.pick(40.0, 8.0), f"unit-{u}") for u in UNITS}
    long = {u: _unit(lab, u, lab.pick(120.0, 8.0), f"unit-{u}-long") for u in UNITS}
    points, full = simulated(lab, short, ORDERS), simulated(lab, long, ORDERS)
    less = simulated(lab, {"a": long["a"]}, ORDERS, changes=TIGHT)
    source, compared = "§4.4, Figure 10", []
    for unit in UNITS:
        compared += _rates(unit, points[unit], source)
        compared.append(fairness(unit, full[unit], source))
        if compared[-1].agrees is False and unit in less:
            what = f"({unit}) distance from the fair parts, next best over ADBS"
            closer = _closer(full[unit]), _closer(less[unit])
            compared.append(findings.cause(f"{what}, {LESS_MEMORY} a GPU", *closer))
    return study_of(points, compared, _scheduled(points, full), [setup.FAIR])


def _rates(unit: str, found: Orders, source: str) -> list[Statement]:
    rates, said = {name: _completed(o) for name, o in found.items()}, PUBLISHED_RPS[unit]
    what = f"({unit}) throughput (req/s)"
    compared = [findings.order(what, rates, tuple(said), source)]
    for name in ("round-robin", "fcfs"):
        ratio = findings.ratio(rates["adbs"], rates[name])
        what = f"({unit}) throughput, ADBS over {name}"
        compared.append(findings.factor(what, ratio, said["adbs"] / said[name], source))
    return compared


def _scheduled(points: Points, full: Points) -> dict[str, Plot]:
    ylabel = "share of the KV memory in use (%)"
    plots = {}
    for unit, found in full.items():
        shares = {name: _kv_shares(o) for name, o in found.items()}
        plots[f"kv-{unit}"] = Plot(f"KV memory, ({unit})", "", ylabel, shares, bars=True)
    rates = lines(points, _completed)
    return {**plots, "throughput": Plot("Schedulers", "", "requests/s", rates, bars=True)}


def _unit(lab: Lab, unit: str, seconds: float, name: str) -> str:
    parts = UNITS[unit]
    models = [setup.PopularModel(f"{s}-{i}", s, i, float(r)) for i, (s, r, _) in enumerate(parts)]
    longer = {
        m.name: setup.longer(SHAREGPT, x, x) for m, (_, _, x) in zip(models, parts, strict=True)
    }
    rate_rps = sum(r for _, r, _ in parts) * lab.pick(1.0, 0.1)
    return lab.setup(
        name, setup.cluster(models, 4), setup.drawn_by_share(lab, models, rate_rps, seconds, longer)
    )


def _completed(found: TrialOutcome) -> float | None:
    return None if found.summary is None else found.completed_rps


def _kv_shares(found: TrialOutcome) -> list[tuple[Any, float | None]]:
    whole = sum(m.kv_bytes for m in found.models.values())
    return [(n, 100 * m.kv_bytes / whole if whole else None) for n, m in found.models.items()]


def unfairness(found: TrialOutcome) -> float | None:
    """Returns the difference in points of the models' shares of KV memory from their fair shares.

    The differences are summed over the models. The fair share is R of equation 2 and §3.3, the
    target of quotas: requests x tokens x bytes of a token.
    """
    asked = sum(m.asked_kv_bytes for m in found.models.values())
    held = sum(m.kv_bytes for m in found.models.values())
    if not asked or not held:
        return None
    pairs = ((m.kv_bytes / held, m.asked_kv_bytes / asked) for m in found.models.values())
    return 100 * sum(abs(share - fair) for share, fair in pairs)


def _closer(found: Orders) -> float | None:
    """Returns the ratio of the next best unfairness to that of ADBS."""
    far = {name: unfairness(outcome) for name, outcome in found.items()}
    others = [v for name, v in far.items() if name != "adbs" and v is not None]
    return findings.ratio(min(others, default=None), far["adbs"])


def fairness(unit: str, found: Orders, source: str) -> Statement:
    """Compares fairness.

    §4.4: "more closely aligned with the distribution of arrival rates, thus [...] fairer".
    """
    far = {name: unfairness(outcome) for name, outcome in found.items()}
    known = {name: value for name, value in far.items() if value is not None}
    holds = min(known, key=lambda name: known[name]) == "adbs" if len(known) == len(far) else None
    what = f"({unit}) ADBS' KV memory is closest to the fair parts of arrival rates"
    return findings.claim(
        what, holds, {f"points off, {name}": v for name, v in known.items()}, "closest", source
    )
