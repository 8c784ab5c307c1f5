"""Sweeps of rates, SLO scales and GPUs for the studies of Prism's evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lab.papers.prism.prism_setup import E2E_MODELS, Cluster, model_names, prepared
from lab.papers.study import findings, tuning
from lab.papers.study.findings import Findings, Plot, Statement
from lab.papers.study.lab import Lab
from lab.papers.study.lines import TARGET, Line, Lines, Points, lines, problems, row
from lab.papers.study.trial import Trial, TrialOutcome
from lab.papers.study.tuning import Settings, Systems, Tuned, simulated

GIVEN = "muxserve++ at given TP"
LISTED = "muxserve++ as listed"
AWARE = "qlm to instances by estimated wait"
AT_TP = "muxserve++, at the TP degrees of the setup"
Models = Sequence[tuple[str, int]]
"""(shape, TP degree) of each model, the most popular first."""
SYSTEMS = {
    "prism": ("prism", ""),
    "muxserve++": ("muxserve++", ""),
    GIVEN: ("muxserve++", "given"),
    "static": ("static", ""),
    "qlm": ("qlm-first-idle", ""),
    "serverlessllm": ("serverlessllm", ""),
}
"""Name -> (policy, variant) of the systems in the paper's Figures 7 and 12, and of ServerlessLLM
from its published version. MuxServe++ is included twice: with its own search, which may spread a
model over several GPUs, and at the TP degrees of the paper's setup (one GPU if the model fits,
§7.3; "following common TP practices" for larger ones, §7.5). QLM takes the first idle instance, as
§7.5 found it to."""
EIGHT_SYSTEMS = {**SYSTEMS, LISTED: ("muxserve++", "listed"), AWARE: ("qlm", "")}
"""Systems for eight models, with two more that are not tuned. MuxServe++ as in its listing uses the
given TP, mean rates, and the first of equal meshes. QLM by its own rule uses estimated waits: in
Prism §7.5 it assigns requests to the first idle instance, with which more GPUs do not help, while
it needs eight GPUs in Table 1."""
BASELINES = tuple(name for name in SYSTEMS if name != "prism")
Levels = tuple[str | tuple[str, ...], ...]
"""Systems, best first. The paper does not order the systems within a tuple."""
PRISM_FIRST: Levels = ("prism", ("muxserve++", "static", "qlm", "serverlessllm"))
OSDI = "OSDI 2026 version"

METRICS = ("ttft", "tpot")
SLO_SCALES = {"hyperbolic": 20.0, "arena-chat": 10.0}
"""Style -> SLO scale of TTFT at which Prism has 99 % on two GPUs (§7.3, Figure 7, middle row)."""
TPOT_SCALES = {"hyperbolic": 22.0, "arena-chat": 3.0}
"""Style -> SLO scale of TPOT at which Prism has 99 % on two GPUs."""
RATES = (4.0, 8.0, 16.0, 24.0, 32.0, 48.0)
SECONDS = 600.0
EIGHT = [(name, 1) for name in E2E_MODELS]
EIGHT_8B = [("Llama-3.1-8B", 1)] * 8
"""Models whose weights take 83 % of the memory for models on two GPUs of 80 GB; EIGHT take 42 %."""


def tpot_part(style: str) -> float:
    return TPOT_SCALES[style] / SLO_SCALES[style]


def eight_model_cluster(lab: Lab, style: str, models: Models = EIGHT) -> Cluster:
    """Returns the setup of eight models on two GPUs (§7.3): EIGHT or EIGHT_8B."""
    cluster = with_models(lab, f"eight-{style}", style, models)
    return replace(cluster, tuned=tuned(lab, style, models))


def with_models(lab: Lab, name: str, style: str, models: Models) -> Cluster:
    trace = lab.sources.styled(style, model_names(len(models)), lab.pick(SECONDS, 20.0), lab.seed)
    return prepared(lab, name, models, trace, tpot_part=tpot_part(style))


TUNING_RATE = 32.0
"""Rate of Figure 7 at which systems begin to differ."""
TUNING_TRACES, TUNING_SECONDS = 2, 300.0
"""Several traces: a placement by rates varies more with the trace than with its length."""


def tuned(lab: Lab, style: str, models: Models = EIGHT) -> Tuned:
    """Tunes all systems on eight models and two GPUs. EIGHT is also used for eighteen models."""
    seconds, rate = lab.pick(TUNING_SECONDS, 20.0), lab.pick(TUNING_RATE, 8.0)
    clusters = []
    for number in range(lab.pick(TUNING_TRACES, 1)):
        there = tuning.tuning_lab(lab, number)
        trace = there.sources.styled(style, model_names(len(models)), seconds, there.seed)
        name = f"tuning-{style}-{number}"
        clusters.append(prepared(there, name, models, trace, tpot_part=tpot_part(style)))
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


def compared_systems(lab: Lab, whole: Systems = SYSTEMS) -> Systems:
    return {n: whole[n] for n in lab.pick(tuple(whole), ("prism", "muxserve++", "static"))}


def at(cluster: Cluster, system: str, **changes: Any) -> Trial:
    """Returns a trial of the system with its tuned settings."""
    policy, variant = EIGHT_SYSTEMS[system]
    settings = {**cluster.tuned.of(system), **changes, "policy": policy}
    return Trial(cluster.config, settings, variant=variant)


def attained(lab: Lab, trials: Sequence[Trial], metric: str = "ttft") -> list[float | None]:
    """Returns the attainment of each trial in percent."""
    return [outcome.percent(metric) for outcome in lab.run(trials)] if trials else []


def held_rate(lab: Lab, cluster: Cluster, fixed: Settings, rates: Sequence[float] = ()) -> float:
    """Returns the highest tried rate scale at which Prism has 99 % TTFT, or else the lowest one.

    At this load, the paper's statement about Prism is tight.

    Args:
        rates: Rate scales to try, by default RATES. Three more are tried between the last one at
            which Prism has 99 % and the next.
    """
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


def sweep(
    lab: Lab,
    cluster: Cluster,
    key: str,
    values: Sequence[Any],
    fixed: Settings,
    *,
    whole: Systems = SYSTEMS,
) -> Points:
    """Runs all systems over the values of one key."""
    setups = dict.fromkeys(values, cluster.config)
    return simulated(lab, setups, compared_systems(lab, whole), cluster.tuned, fixed, key=key)


def attainments(points: Points, metric: str) -> Lines:
    """Returns the attainments in percent, without systems that were not simulated."""
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
    """Adds the rows, the budget and the remarks of a sweep to a study."""
    study.rows.extend(
        row(found, style=style, policy=name, **{key: x}) for name, x, found in by_system(points)
    )
    study.budget.extend(cluster.tuned.log)
    study.budget.append(f"{where}: {cluster.described()}" if where else cluster.described())
    lost = problems(found for _, _, found in by_system(points))
    study.remarks.extend(reason for reason in lost if reason not in study.remarks)


def figure(title: str, xlabel: str, found: Lines, metric: str) -> Plot:
    return Plot(title, xlabel, f"{metric.upper()} attainment (%)", found)


def orders(
    what: str, values: Mapping[str, float | None], source: str, levels: Levels = PRISM_FIRST
) -> list[Statement]:
    """Compares the order of systems, for each variant of MuxServe++ and QLM in `values`.

    If MuxServe++ with its own search is better than Prism, an ablation shows the effect of TP
    degrees.
    """
    found = [findings.order(what, values, levels, source)]
    if GIVEN in values and with_named(levels, GIVEN) != levels and "prism" in levels:
        pair = findings.order(what, values, ("prism", "muxserve++"), source)
        if pair.agrees is False:
            prism, free, given = (values.get(n) for n in ("prism", "muxserve++", GIVEN))
            ratios = findings.ratio(prism, free), findings.ratio(prism, given)
            found.append(findings.cause(f"{what}, Prism over {AT_TP}", *ratios))
    for name in (GIVEN, LISTED, AWARE):
        other = with_named(levels, name)
        if name in values and other != levels:
            found.append(findings.order(what, values, other, source))
    return found


def with_named(levels: Levels, name: str) -> Levels:
    """Returns the levels with GIVEN or LISTED instead of MuxServe++, or AWARE instead of QLM."""
    named = {"qlm" if name == AWARE else "muxserve++": name}
    return tuple(
        named.get(level, level)
        if isinstance(level, str)
        else tuple(named.get(one, one) for one in level)
        for level in levels
    )


def known_ends(line: Line) -> tuple[tuple[Any, float], tuple[Any, float]] | None:
    """Returns the first and the last simulated point; None if there are fewer than two."""
    known = [(x, y) for x, y in line if y is not None]
    return (known[0], known[-1]) if len(known) > 1 else None
