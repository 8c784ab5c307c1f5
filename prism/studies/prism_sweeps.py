"""How the studies of Prism's evaluation sweep rates, SLO scales and GPUs, and read the lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from prism.replay import transforms
from prism.studies import findings, tuning
from prism.studies.findings import Comparison, Plot
from prism.studies.lab import Lab
from prism.studies.prism_setup import (
    E2E_MODELS,
    Cluster,
    attainment,
    model_names,
    prepared,
    problems,
    row,
)
from prism.studies.trial import Measured, Trial
from prism.studies.tuning import Tuned

GIVEN = "muxserve++ at given TP"
AT_TP = "muxserve++, at the TP degrees of the setup"
SYSTEMS = {
    "prism": ("prism", ""),
    "muxserve++": ("muxserve++", ""),
    GIVEN: ("muxserve++", "given"),
    "static": ("static", ""),
    "qlm": ("qlm", ""),
    "serverlessllm": ("serverlessllm", ""),
}
"""name -> (policy, variant): those of the paper's Figures 7 and 12, and ServerlessLLM, which its
published version adds. MuxServe++ twice: as its own search places models, free to spread each over
several GPUs, and at the TP degrees that the paper's setup gives models (one GPU for all that fit on
one, §7.3; "following common TP practices" for larger ones, §7.5)."""
BASELINES = tuple(name for name in SYSTEMS if name != "prism")
Levels = tuple[str | tuple[str, ...], ...]
"""Best first; of those in a tuple the paper says nothing among each other."""
PRISM_FIRST: Levels = ("prism", ("muxserve++", "static", "qlm", "serverlessllm"))
OSDI = "OSDI 2026 version"

TARGET = 99.0
METRICS = ("ttft", "tpot")
SLO_SCALES = {"hyperbolic": 20.0, "arena-chat": 10.0}
"""At which Prism has 99 % TTFT on its two GPUs (§7.3, Figure 7, middle row)."""
RATES = (16.0, 24.0, 28.0, 32.0, 40.0, 48.0)
SECONDS = 900.0
TRACES = 4
TIGHT = "48GB"
"""Memory of a GPU; the eight models' weights take three quarters of two, not two fifths."""
AS_FAST = {"activation.restart": "30ms", "activation.plain_load_rate": "23GB"}
"""QLM's swaps at the speed of Prism's activations."""
Lines = dict[str, list[tuple[Any, float | None]]]
Swept = dict[str, list[tuple[Any, Measured]]]


def eight(lab: Lab, style: str) -> Cluster:
    """Eight models on two GPUs (§7.3), of the prototype's sizes; the trace is the second half of a
    longer one, the first is kept as its history."""
    models = [(name, 1) for name in E2E_MODELS]
    cluster = with_history(lab, f"eight-{style}", style, models, lab.pick(SECONDS, 20.0))
    return replace(cluster, tuned=tuned(lab, style))


TUNING_RATE = 32.0
"""Of the rates of Figure 7 the one at which systems begin to differ."""
TUNING_TRACES, TUNING_SECONDS = 3, 300.0
"""Where a placement by a trace's rates puts models is that trace's luck, more than its length's."""


def tuned(lab: Lab, style: str) -> Tuned:
    """All systems on eight models and two GPUs, for every study of them and of the eighteen."""
    models = [(name, 1) for name in E2E_MODELS]
    seconds, rate = lab.pick(TUNING_SECONDS, 20.0), lab.pick(TUNING_RATE, 8.0)
    clusters = []
    for number in range(lab.pick(TUNING_TRACES, 1)):
        there = tuning.elsewhere(lab, number)
        trace = there.sources.styled(style, model_names(len(models)), seconds, there.seed)
        clusters.append(prepared(there, f"tuning-{style}-{number}", models, trace))
    fixed = {"slo_scale": SLO_SCALES[style], "rate_scale": rate}
    load = (
        f"{len(clusters)} other traces of {style}, {seconds:g} s each, 8 models on 2 GPUs at "
        f"rate scale {rate:g}"
    )
    return tuned_on(lab, clusters, fixed, load)


def tuned_on(lab: Lab, clusters: Sequence[Cluster], fixed: Mapping[str, Any], load: str) -> Tuned:
    systems = {name: SYSTEMS[name] for name in compared(lab)}
    return tuning.tune(
        lab,
        [cluster.config for cluster in clusters],
        systems,
        lambda found: attainment(found, "ttft"),
        load=load,
        what="mean TTFT attainment (%)",
        fixed=fixed,
    )


def compared(lab: Lab) -> tuple[str, ...]:
    return lab.pick(tuple(SYSTEMS), ("prism", "muxserve++", "static"))


def several(lab: Lab, style: str) -> list[Cluster]:
    """As `eight`, on TRACES traces: one after the other seed. What is true of one trace of 15
    minutes, in which a few bursts decide, may be the other way round in the next."""
    models = [(name, 1) for name in E2E_MODELS]
    seconds, names = lab.pick(SECONDS, 20.0), [f"eight-{style}"]
    names += [f"eight-{style}-{number}" for number in range(1, lab.pick(TRACES, 1))]
    return [
        with_history(replace(lab, seed=lab.seed + i), name, style, models, seconds)
        for i, name in enumerate(names)
    ]


def with_history(
    lab: Lab, name: str, style: str, models: Sequence[tuple[str, int]], seconds: float
) -> Cluster:
    """`seconds` each of history and trace, half of the style's own arrivals if that is less."""
    whole = lab.sources.styled(style, model_names(len(models)), 2 * seconds, lab.seed)
    seconds = lab.sources.lasting(style, len(models), 2 * seconds) / 2
    before = transforms.window(whole, 0, seconds)
    trace = transforms.window(whole, seconds)
    return prepared(lab, name, models, trace, history=before)


def held_rate(
    lab: Lab, cluster: Cluster, fixed: Mapping[str, Any], rates: Sequence[float] = ()
) -> float:
    """The highest rate scale tried at which Prism holds 99 % TTFT, the load at which the paper's
    own statement about Prism is tight; the lowest where it holds it at none. rates: default RATES;
    three more are tried between the last that it holds and the next."""
    rates = rates or lab.pick(RATES, (4.0, 8.0))
    best = _held(lab, cluster, fixed, rates)
    above = [rate for rate in rates if rate > best]
    if best and above:
        finer = [best + (above[0] - best) * part for part in (0.25, 0.5, 0.75)]
        best = max(best, _held(lab, cluster, fixed, finer))
    return best or rates[0]


def _held(lab: Lab, cluster: Cluster, fixed: Mapping[str, Any], rates: Sequence[float]) -> float:
    trials = [at(cluster, "prism", **fixed, rate_scale=rate) for rate in rates]
    found = lab.run(trials, "the load that Prism holds")
    shares = [attainment(outcome, "ttft") or 0.0 for outcome in found]
    held = [rate for rate, share in zip(rates, shares, strict=True) if share >= TARGET]
    return max(held, default=0.0)


def sweep(
    lab: Lab, cluster: Cluster, key: str, values: Sequence[Any], fixed: Mapping[str, Any]
) -> tuple[Swept, list[str]]:
    """system -> (value, outcome) over one key; and why points were not simulated."""
    named = [(system, value) for system in compared(lab) for value in values]
    trials = [at(cluster, system, **{**fixed, key: value}) for system, value in named]
    outcomes = lab.run(trials, key)
    found: Swept = {}
    for (system, value), outcome in zip(named, outcomes, strict=True):
        found.setdefault(system, []).append((value, outcome))
    return found, problems(trials, outcomes)


def at(cluster: Cluster, system: str, **changes: Any) -> Trial:
    """With the settings that the system was tuned to."""
    policy, variant = SYSTEMS[system]
    settings = {**cluster.tuned.of(system), **changes, "policy": policy}
    return Trial(cluster.config, settings, variant=variant)


def lines(found: Mapping[str, Sequence[tuple[Any, Measured]]], metric: str) -> Lines:
    """Attainment in percent; systems that were not simulated are left out."""
    return {
        policy: [(value, attainment(outcome, metric)) for value, outcome in points]
        for policy, points in found.items()
        if any(outcome.summary for _, outcome in points)
    }


def rows(style: str, key: str, found: Mapping[str, Sequence[tuple[Any, Measured]]]) -> list[Any]:
    return [
        row(outcome, style=style, policy=policy, **{key: value})
        for policy, points in found.items()
        for value, outcome in points
    ]


def orders(
    what: str, values: Mapping[str, float | None], source: str, levels: Levels = PRISM_FIRST
) -> list[Comparison]:
    """The paper's order, with MuxServe++ as its search places and at the given TP degrees; where it
    is ahead of Prism, whether the TP degrees are why."""
    found = [findings.order(what, values, levels, source)]
    if GIVEN in values and at_given_tp(levels) != levels and "prism" in levels:
        pair = findings.order(what, values, ("prism", "muxserve++"), source)
        if pair.agrees is False:
            prism, free, given = (values.get(n) for n in ("prism", "muxserve++", GIVEN))
            ratios = findings.ratio(prism, free), findings.ratio(prism, given)
            found.append(findings.cause(f"{what}, Prism over {AT_TP}", *ratios))
        found.append(findings.order(what, values, at_given_tp(levels), source))
    return found


def at_given_tp(levels: Levels) -> Levels:
    """The same with MuxServe++ at the given TP degrees."""

    def renamed(name: str) -> str:
        return GIVEN if name == "muxserve++" else name

    return tuple(
        renamed(level) if isinstance(level, str) else tuple(map(renamed, level)) for level in levels
    )


def elsewhere(
    lab: Lab,
    settings: Tuned,
    style: str,
    points: Sequence[Mapping[str, Any]],
    values: Mapping[str, float | None],
) -> list[Comparison]:
    """Where `values`, mean TTFT attainments over `points`, have static above MuxServe++ at the
    given TP, which is not as published: whether this trace is why, by the means of the others of
    its kind."""
    here = findings.ratio(values.get(GIVEN), values.get("static"))
    if here is None or here >= 1 - findings.EQUAL:
        return []
    clusters = [replace(cluster, tuned=settings) for cluster in several(lab, style)[1:]]
    means = [
        mean([(0, attainment(outcome, "ttft")) for outcome in lab.run(trials, "other traces")])
        for trials in (
            [at(c, name, **point) for c in clusters for point in points]
            for name in (GIVEN, "static")
        )
    ]
    what = f"{style}: TTFT, {GIVEN} over static, on {len(clusters)} other traces"
    return [findings.cause(what, here, findings.ratio(*means), wanted=1.0)]


def up_to(points: Sequence[tuple[Any, float | None]], target: float = TARGET) -> float | None:
    """The largest x to which a falling line stays at the target, between points by interpolation;
    the last x where it never falls below, None where it starts below."""
    held: tuple[float, float] | None = None
    for x, y in points:
        if y is None:
            return None
        if y < target:
            if held is None:
                return None
            x0, y0 = held
            return float(x0 + (x - x0) * (y0 - target) / (y0 - y)) if y0 > y else x0
        held = (float(x), y)
    return held[0] if held else None


def since(points: Sequence[tuple[Any, float | None]], target: float = TARGET) -> float | None:
    """The smallest x at which a rising line is at the target; None where it never is."""
    return next((float(x) for x, y in points if y is not None and y >= target), None)


def mean(points: Sequence[tuple[Any, float | None]]) -> float | None:
    values = [y for _, y in points if y is not None]
    return sum(values) / len(values) if values else None


def figure(title: str, xlabel: str, found: Lines, metric: str) -> Plot:
    return Plot(title, xlabel, f"{metric.upper()} attainment (%)", found)
