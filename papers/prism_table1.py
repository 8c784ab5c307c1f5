"""Prism's Table 1: SLO attainment with two GPUs, and GPUs needed (§1, §7.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from papers import findings
from papers import prism_sweeps as sweeps
from papers.findings import Findings, Statement
from papers.lab import Lab
from papers.lines import Lines, Points, first_at_target, row
from papers.prism_setup import FAIR_TUNED, Cluster
from papers.trial import Trial, TrialOutcome
from papers.tuning import Settings

SHARES = {"prism": 99.0, "muxserve++": 51.0, sweeps.GIVEN: 51.0, "qlm": 45.0, "static": 39.0}
"""SLO attainment with two GPUs, in percent, best first."""
NEEDED = {"prism": 2, "muxserve++": 5, sweeps.GIVEN: 5, "static": 7, "qlm": 8}
TABLE: sweeps.Levels = ("prism", "muxserve++", "qlm", "static")
SHOWN = "TTFT attainment on 2 GPUs"
STYLE = "hyperbolic"


def table1(lab: Lab) -> Findings:
    cluster, study = sweeps.eight_model_cluster(lab, STYLE), Findings([], [], {}, [FAIR_TUNED])
    fixed = {"slo_scale": sweeps.SLO_SCALES[STYLE]}
    load = fixed["rate_scale"] = sweeps.held_rate(lab, cluster, {**fixed, "gpus.count": 2})
    points = sweeps.sweep(lab, cluster, "gpus.count", lab.pick((2, 3, 4, 5, 8), (2, 3)), fixed)
    points = _with_said(lab, cluster, fixed, points)
    sweeps.gather(study, points, cluster, STYLE, "gpus")
    study.remarks.append(
        f"The load is rate scale {load:g}, the highest tried at which Prism holds 99 % TTFT on 2 "
        "GPUs, so that its own row is what the load was chosen by"
    )
    found, two = sweeps.attainments(points, "ttft"), {**fixed, "gpus.count": 2}
    study.plots["gpus"] = sweeps.figure("TTFT attainment by GPUs", "GPUs", found, "ttft")
    with_two = {policy: line[0][1] for policy, line in found.items()}
    parts = _parts(lab, cluster, two)
    study.rows.extend(row(o, style=STYLE, policy=n, gpus=2) for n, o in parts.items())
    shares = {name: outcome.percent("ttft") for name, outcome in parts.items()}
    study.comparisons.extend(sweeps.orders(SHOWN, with_two, "Table 1", TABLE))
    study.comparisons.extend(_tighter(lab, cluster, two))
    study.comparisons.extend(sweeps.on_other_traces(lab, cluster.tuned, STYLE, two, with_two))
    study.comparisons.extend(_values(with_two, shares))
    study.comparisons.extend(_gpus(found))
    study.comparisons.extend(_prisms(lab, cluster, two, with_two, shares))
    return study


STILL = "prism without migration and balance"
ARRIVAL = "prism in order of arrival"
BEFORE = "by the rates of the 15 minutes before"


def _parts(lab: Lab, cluster: Cluster, fixed: Settings) -> dict[str, TrialOutcome]:
    """Policies on 2 GPUs, as they are tuned, with the part changed that may be the cause."""
    named: dict[str, tuple[str, str, str, dict[str, Any]]] = {
        STILL: ("prism", "no-global", "", {}),
        ARRIVAL: ("prism", "no-local", "", {}),
        f"muxserve++ {BEFORE}": ("muxserve++", "", cluster.history, {}),
        f"{sweeps.GIVEN} {BEFORE}": ("muxserve++", "given", cluster.history, {}),
        "muxserve++ by equal rates": ("muxserve++", "blind", "", {}),
        f"{sweeps.GIVEN} by equal rates": ("muxserve++", "given-blind", "", {}),
        "qlm to instances by estimated wait": ("qlm-aware", "", "", {}),
        "qlm, late queues by deadline": ("qlm", "by-deadline", "", {}),
        "qlm with Prism's activations for restarts": ("qlm", "", "", sweeps.AS_FAST),
    }
    trials = [
        Trial(
            cluster.config,
            {**cluster.tuned.of(base_of(name)), **fixed, **more, "policy": policy},
            variant=variant,
            history=history,
        )
        for name, (policy, variant, history, more) in named.items()
    ]
    return dict(zip(named, lab.run(trials, "parts"), strict=True))


def _tighter(lab: Lab, cluster: Cluster, fixed: Settings) -> list[Statement]:
    """Whether memory is what turns the table's order: it with less of it, all else the same."""
    names = [name for name in SHARES if name in sweeps.compared_systems(lab)]
    shares = sweeps.attained(
        lab, [sweeps.at(cluster, n, **{**fixed, "gpus.memory": sweeps.TIGHT}) for n in names]
    )
    what, values = f"{SHOWN} of {sweeps.TIGHT} each", dict(zip(names, shares, strict=True))
    return [
        findings.ablated(findings.order(what, values, levels, "Table 1"))
        for levels in (TABLE, sweeps.at_given_tp(TABLE))
    ]


def base_of(name: str) -> str:
    """The system that an ablation is of: of "muxserve++ at given TP by ..." not muxserve++."""
    return sweeps.GIVEN if name.startswith(sweeps.GIVEN) else name.split(maxsplit=1)[0].rstrip(",")


def _with_said(lab: Lab, cluster: Cluster, fixed: Settings, points: Points) -> Points:
    """Static partition also with the GPUs that Table 1 says it needs, where fewer do not do."""
    said = NEEDED["static"]
    fewer = [(count, o["static"].percent("ttft")) for count, o in points.items() if count < said]
    if first_at_target(fewer) is not None or max(points) <= said:
        return points
    (outcome,) = lab.run([sweeps.at(cluster, "static", **{**fixed, "gpus.count": said})])
    return dict(sorted({**points, said: {"static": outcome}}.items()))


def _prisms(
    lab: Lab,
    cluster: Cluster,
    fixed: Settings,
    whole: Mapping[str, float | None],
    parts: Mapping[str, float | None],
) -> list[Statement]:
    """Prism's own parts. Where they show no gain: whether what it is compared with is why (models
    that stand as they are listed), and whether the load at which nearly all is in time in any
    order."""
    same = {**cluster.tuned.of("prism"), **fixed, "policy": "prism"}
    twice = {**same, "rate_scale": 2 * fixed["rate_scale"]}
    changed = {
        STILL: ("models in order", same, "in-order"),
        ARRIVAL: ("twice the load", twice, "no-local"),
    }
    compared = []
    for part, (change, changes, without) in changed.items():
        here = findings.ratio(whole.get("prism"), parts[part])
        what = f"prism over {part.removeprefix('prism ')}"
        compared.append(_part(what, here, part == STILL))
        if here is None or here > 1 + findings.EQUAL:
            continue
        trials = [Trial(cluster.config, changes, variant=variant) for variant in ("", without)]
        ratio = findings.ratio(*sweeps.attained(lab, trials))
        compared.append(findings.cause(f"{what}, {change}", here, ratio))
    return compared


def _part(what: str, here: float | None, published: bool) -> Statement:
    """The paper has a gain by the global scheduler for eight models on two GPUs; by the local one,
    only for two models on one GPU."""
    found = findings.factor(f"ablation: {what}", here, None, "§7.4, Figure 10 (a)")
    if published:
        return found
    said = "not published for 8 models"
    return msgspec.structs.replace(found, published=said, source="ours", agrees=None)


def nearer_to_published(
    what: str, here: float | None, changed: float | None, said: float
) -> Statement:
    """Whether a change moves a row (in %), by more than EQUAL of it, to the published one."""
    verdict, shown = "cannot be formed here", "-"
    if here is not None and changed is not None:
        shown = f"{here:.1f} %, changed {changed:.1f} %"
        moved = abs(changed - here) > findings.EQUAL * here
        nearer = abs(changed - said) < abs(here - said)
        verdict = "names a cause" if moved and nearer else "is not the cause"
    published = f"not published; its row {said:g} %"
    return Statement(f"ablation: {what}", shown, published, verdict, "ours")


def _values(
    with_two: Mapping[str, float | None], parts: Mapping[str, float | None]
) -> list[Statement]:
    """Each row with the ablations that may explain it."""
    compared = []
    for system, said in SHARES.items():
        if system not in with_two:
            continue
        here = with_two[system]
        what = f"TTFT attainment on 2 GPUs, {system}"
        compared.append(findings.value(what, here, said, "Table 1", unit="%"))
        if system == "muxserve++" and sweeps.GIVEN in with_two:
            compared.append(nearer_to_published(sweeps.AT_TP, here, with_two[sweeps.GIVEN], said))
        if system != "prism":
            own = {name: share for name, share in parts.items() if base_of(name) == system}
            for name, share in own.items():
                part = f"{system} {name.removeprefix(system).strip(', ')}"
                compared.append(nearer_to_published(part, here, share, said))
    return compared


def _gpus(found: Lines) -> list[Statement]:
    compared = []
    for system, said in NEEDED.items():
        if system in found:
            line = found[system]
            what, needed, most = f"GPUs for 99 % TTFT, {system}", first_at_target(line), line[-1][0]
            compared.append(findings.reached(what, needed, said, "Table 1", unit="GPUs", most=most))
    return compared
