"""Prism's Figure 10, and what its thresholds do (§6.2, §7.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prism.studies import findings
from prism.studies.findings import Comparison, Findings, Plot
from prism.studies.lab import Lab
from prism.studies.prism_overall import DATA, EIGHT
from prism.studies.prism_setup import FAIR, attainment, problems, row
from prism.studies.prism_sweeps import SLO_SCALES, eight, held_rate
from prism.studies.sources import STYLES
from prism.studies.study import Study
from prism.studies.trial import Measured, Trial

# --- Figure 10 -----------------------------------------------------------------------------

GLOBAL = {"with": "", "without": "no-global"}


def fig10(lab: Lab) -> Findings:
    """At the load that Prism holds, and half as much again."""
    compared: list[Comparison] = []
    bars: dict[str, list[tuple[Any, float | None]]] = {name: [] for name in GLOBAL}
    table, budget = [], [FAIR]
    for style in STYLES:
        cluster = eight(lab, style)
        fixed = {"policy": "prism", "slo_scale": SLO_SCALES[style]}
        load = held_rate(lab, cluster, {"slo_scale": SLO_SCALES[style]})
        budget.append(f"{style}: {cluster.described()}")
        for rate in (load, 1.5 * load):
            where = f"{style}, rate scale {rate:g}"
            changes = {**fixed, "rate_scale": rate}
            trials = [Trial(cluster.config, changes, variant=v) for v in GLOBAL.values()]
            pair = dict(zip(GLOBAL, lab.run(trials, where), strict=True))
            compared += _gains(where, pair)
            for name, found in pair.items():
                bars[name].append((where, attainment(found, "ttft")))
                table.append(row(found, scheduler=name, load=where))
    plots = {"ttft": Plot("TTFT attainment", "", "TTFT attainment (%)", bars, bars=True)}
    return Findings(compared, table, plots, budget)


def _gains(where: str, pair: Mapping[str, Measured]) -> list[Comparison]:
    found = []
    for metric in ("ttft", "tpot"):
        shares = {name: attainment(o, metric) for name, o in pair.items()}
        gain = findings.ratio(shares["with"], shares["without"])
        what = f"{where}: {metric.upper()} attainment with over without the global scheduler"
        found.append(findings.factor(what, gain, None, "§7.4, Figure 10 (a)"))
    return found


# --- thresholds ----------------------------------------------------------------------------


def sensitivity(lab: Lab) -> Findings:
    cluster = eight(lab, "hyperbolic")
    scale = {"slo_scale": SLO_SCALES["hyperbolic"]}
    fixed = {"policy": "prism", **scale, "rate_scale": 1.5 * held_rate(lab, cluster, scale)}
    idle_s = lab.pick((5, 20, 45, 90), (20, 45))
    window_s = lab.pick((15, 60, 240), (60,))
    trials = [Trial(cluster.config, {**fixed, "scheduler.idle_threshold": f"{s}s"}) for s in idle_s]
    trials += [Trial(cluster.config, {**fixed, "scheduler.rate_window": f"{s}s"}) for s in window_s]
    outcomes = lab.run(trials, "thresholds")
    by_idle = dict(zip(idle_s, outcomes, strict=False))
    by_window = dict(zip(window_s, outcomes[len(idle_s) :], strict=True))
    shares = {s: attainment(o, "ttft") for s, o in by_idle.items()}
    best = max(s for s in shares.values() if s is not None)
    usual = by_idle[45]
    minutes = usual.window_s / 600
    source = "OSDI 2026 version"
    compared = [
        findings.claim(
            "45 s of idle time is as good a threshold as any tried",
            (shares[45] or 0.0) >= best * (1 - findings.EQUAL),
            ", ".join(f"{s} s {share or 0:.1f} %" for s, share in shares.items()),
            "best at about 45 s",
            source,
        ),
        findings.value(
            "activations in 10 minutes at 45 s, beyond the first of each model",
            (usual.counts.get("active", 0) - len(usual.models)) / minutes,
            2,
            source,
            within=1.0,
        ),
        findings.value(
            "migrations in 10 minutes at 45 s",
            usual.counts.get("migrated", 0) / minutes,
            3,
            source,
            within=1.0,
        ),
    ]
    windows = {s: attainment(o, "ttft") for s, o in by_window.items()}
    plots = {
        "idle": Plot("Idle threshold", "s", "TTFT attainment (%)", {"prism": list(shares.items())}),
        "window": Plot("Rate window", "s", "TTFT attainment (%)", {"prism": list(windows.items())}),
    }
    table = [row(o, threshold="idle", seconds=s) for s, o in by_idle.items()]
    table += [row(o, threshold="window", seconds=s) for s, o in by_window.items()]
    return Findings(compared, table, plots, [FAIR, cluster.described()], problems(trials, outcomes))


STUDIES = (
    Study(
        "prism-fig10",
        "With and without the global scheduler",
        "Prism, Figure 10, §7.4",
        EIGHT + ", both trace styles, at the load that Prism holds and half as much again",
        "15 minutes of trace, as long as the figure's",
        DATA + " Without the global scheduler, models go where most memory is free and are never "
        "moved, which the paper does not spell out.",
        fig10,
    ),
    Study(
        "prism-sensitivity",
        "Idle threshold and rate window",
        "Prism, idle threshold (§6.2) and its published version",
        EIGHT + ", half as much load again as Prism holds, so that memory is short at times",
        "15 minutes of trace",
        DATA,
        sensitivity,
    ),
)
