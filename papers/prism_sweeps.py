"""How the studies of Prism's evaluation sweep rates, SLO scales and GPUs, and read the lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from papers import findings, tuning
from papers.findings import Findings, Plot, Statement
from papers.lab import Lab
from papers.lines import TARGET, Line, Lines, Points, lines, mean, problems, row
from papers.prism_setup import E2E_MODELS, Cluster, model_names, prepared
from papers.trial import Trial, TrialOutcome
from papers.tuning import Settings, Systems, Tuned, simulated
from prism.replay import transforms

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
EIGHT = [(name, 1) for name in E2E_MODELS]


def eight_model_cluster(lab: Lab, style: str) -> Cluster:
    """Eight models on two GPUs (§7.3), of the prototype's sizes. The trace is the second half of a
    longer one, whose first half is its history."""
    cluster = with_history(lab, f"eight-{style}", style, EIGHT, lab.pick(SECONDS, 20.0))
    return replace(cluster, tuned=tuned(lab, style))


TUNING_RATE = 32.0
"""Of the rates of Figure 7 the one at which systems begin to differ."""
TUNING_TRACES, TUNING_SECONDS = 3, 300.0
"""Where a placement by a trace's rates puts models is that trace's luck, more than its length's."""


def tuned(lab: Lab, style: str) -> Tuned:
    """All systems on eight models and two GPUs, for every study of them and of the eighteen."""
    seconds, rate = lab.pick(TUNING_SECONDS, 20.0), lab.pick(TUNING_RATE, 8.0)
    clusters = []
    for number in range(lab.pick(TUNING_TRACES, 1)):
        there = tuning.elsewhere(lab, number)
        trace = there.sources.styled(style, model_names(len(EIGHT)), seconds, there.seed)
        clusters.append(prepared(there, f"tuning-{style}-{number}", EIGHT, trace))
    fixed = {"slo_scale": SLO_SCALES[style], "rate_scale": rate}
    load = (
        f"{len(clusters)} other traces of {style}, {seconds:g} s each, 8 models on 2 GPUs at "
        f"rate scale {rate:g}"
    )
    return tuned_on(lab, clusters, fixed, load)


def tuned_on(lab: Lab, clusters: Sequence[Cluster], fixed: Settings, load: str) -> Tuned:
    return tuning.tune(
        lab,
        [cluster.config for cluster in clusters],
        compared_systems(lab),
        lambda found: found.percent("ttft"),
        load=load,
        what="mean TTFT attainment (%)",
        fixed=fixed,
    )


def compared_systems(lab: Lab) -> Systems:
    return {n: SYSTEMS[n] for n in lab.pick(tuple(SYSTEMS), ("prism", "muxserve++", "static"))}


def several(lab: Lab, style: str) -> list[Cluster]:
    """As `eight_model_cluster`, untuned, on TRACES traces with a seed each. A few bursts decide a
    trace of 15 minutes; what is true of one may be the other way round in the next."""
    names = [f"eight-{style}"]
    names += [f"eight-{style}-{number}" for number in range(1, lab.pick(TRACES, 1))]
    return [
        with_history(replace(lab, seed=lab.seed + i), name, style, EIGHT, lab.pick(SECONDS, 20.0))
        for i, name in enumerate(names)
    ]


def with_history(
    lab: Lab, name: str, style: str, models: Sequence[tuple[str, int]], seconds: float
) -> Cluster:
    """`seconds` each of history and trace, half of the style's own arrivals if that is less."""
    whole = lab.sources.styled(style, model_names(len(models)), 2 * seconds, lab.seed)
    seconds = lab.sources.lasting(style, len(models), 2 * seconds) / 2
    before = transforms.window(whole, 0, seconds)
    return prepared(lab, name, models, transforms.window(whole, seconds), history=before)


def at(cluster: Cluster, system: str, **changes: Any) -> Trial:
    """With the settings that the system was tuned to."""
    policy, variant = SYSTEMS[system]
    settings = {**cluster.tuned.of(system), **changes, "policy": policy}
    return Trial(cluster.config, settings, variant=variant)


def attained(lab: Lab, trials: Sequence[Trial], metric: str = "ttft") -> list[float | None]:
    """Attainments in percent."""
    return [outcome.percent(metric) for outcome in lab.run(trials)] if trials else []


def held_rate(lab: Lab, cluster: Cluster, fixed: Settings, rates: Sequence[float] = ()) -> float:
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


def _held(lab: Lab, cluster: Cluster, fixed: Settings, rates: Sequence[float]) -> float:
    shares = attained(lab, [at(cluster, "prism", **fixed, rate_scale=rate) for rate in rates])
    held = [r for r, share in zip(rates, shares, strict=True) if (share or 0.0) >= TARGET]
    return max(held, default=0.0)


def sweep(lab: Lab, cluster: Cluster, key: str, values: Sequence[Any], fixed: Settings) -> Points:
    """All systems over the values of one key."""
    setups = dict.fromkeys(values, cluster.config)
    return simulated(lab, setups, compared_systems(lab), cluster.tuned, fixed, key=key)


def attainments(points: Points, metric: str) -> Lines:
    """In percent; systems that were not simulated are left out."""
    found = lines(points, lambda outcome: outcome.percent(metric))
    return {name: line for name, line in found.items() if any(y is not None for _, y in line)}


def by_system(points: Points) -> Iterator[tuple[str, Any, TrialOutcome]]:
    for name in next(iter(points.values())):
        for x, found in points.items():
            if name in found:
                yield name, x, found[name]


def gather(
    study: Findings, points: Points, cluster: Cluster, style: str, key: str, *, where: str = ""
) -> None:
    """Add the rows, the budget and the remarks of a sweep to a study."""
    study.rows.extend(
        row(found, style=style, policy=name, **{key: x}) for name, x, found in by_system(points)
    )
    study.budget.extend(cluster.tuned.said)
    study.budget.append(f"{where}: {cluster.described()}" if where else cluster.described())
    lost = problems(found for _, _, found in by_system(points))
    study.remarks.extend(reason for reason in lost if reason not in study.remarks)


def figure(title: str, xlabel: str, found: Lines, metric: str) -> Plot:
    return Plot(title, xlabel, f"{metric.upper()} attainment (%)", found)


def orders(
    what: str, values: Mapping[str, float | None], source: str, levels: Levels = PRISM_FIRST
) -> list[Statement]:
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
    named = {"muxserve++": GIVEN}
    return tuple(
        named.get(level, level)
        if isinstance(level, str)
        else tuple(named.get(name, name) for name in level)
        for level in levels
    )


def on_other_traces(
    lab: Lab, settings: Tuned, style: str, point: Settings, values: Mapping[str, float | None]
) -> list[Statement]:
    """Where `values`, TTFT attainments at `point`, have static above MuxServe++ at the given TP,
    which is not as published: whether this trace is why, by the means of others of its kind."""
    here = findings.ratio(values.get(GIVEN), values.get("static"))
    if here is None or here >= 1 - findings.EQUAL:
        return []
    clusters = [replace(cluster, tuned=settings) for cluster in several(lab, style)[1:]]
    given, static = (
        mean([(0, share) for share in attained(lab, [at(c, name, **point) for c in clusters])])
        for name in (GIVEN, "static")
    )
    what = f"{style}: TTFT, {GIVEN} over static, on {len(clusters)} other traces"
    return [findings.cause(what, here, findings.ratio(given, static), wanted=1.0)]


def known_ends(line: Line) -> tuple[tuple[Any, float], tuple[Any, float]] | None:
    """The first and the last point that were simulated; None where these are not two."""
    known = [(x, y) for x, y in line if y is not None]
    return (known[0], known[-1]) if len(known) > 1 else None
