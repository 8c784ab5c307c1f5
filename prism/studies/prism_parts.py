"""Prism's Figure 10, and what its thresholds do (§6.2, §7.4)."""

from __future__ import annotations

from typing import Any

from prism.studies import findings
from prism.studies.findings import Comparison, Findings, Plot
from prism.studies.lab import Lab
from prism.studies.prism_overall import DATA, EIGHT, SLO_SCALE, eight
from prism.studies.prism_setup import FAIR, attainment, problems, row
from prism.studies.study import Study
from prism.studies.trial import Trial

# --- Figure 10 -----------------------------------------------------------------------------

GLOBAL = {"with": "", "without": "no-global"}


def fig10(lab: Lab) -> Findings:
    cluster = eight(lab, "hyperbolic")
    rates = lab.pick((32.0, 64.0), (8.0,))
    memories = lab.pick(("80GiB", "40GiB"), ("40GiB",))
    points = [(memory, rate) for memory in memories for rate in rates]
    trials = [
        Trial(
            cluster.config,
            {
                "policy": "prism",
                "slo_scale": SLO_SCALE,
                "rate_scale": rate / 2 if memory == "40GiB" else rate,
                "gpus.memory": memory,
            },
            variant=variant,
        )
        for memory, rate in points
        for variant in GLOBAL.values()
    ]
    outcomes = iter(lab.run(trials, "with and without"))
    compared: list[Comparison] = []
    bars: dict[str, list[tuple[Any, float | None]]] = {name: [] for name in GLOBAL}
    table = []
    for memory, rate in points:
        pair = {name: next(outcomes) for name in GLOBAL}
        where = f"{memory}, rate scale {rate / 2 if memory == '40GiB' else rate:g}"
        for metric in ("ttft", "tpot"):
            shares = {name: attainment(o, metric) for name, o in pair.items()}
            gain = findings.ratio(shares["with"], shares["without"])
            what = f"{where}: {metric.upper()} attainment with over without the global scheduler"
            said = "§7.4, Figure 10 (a)"
            compared.append(findings.factor(what, gain, None, said))
            if metric == "ttft":
                for name, share in shares.items():
                    bars[name].append((where, share))
        table += [row(o, scheduler=name, load=where) for name, o in pair.items()]
    plots = {"ttft": Plot("TTFT attainment", "", "TTFT attainment (%)", bars, bars=True)}
    return Findings(compared, table, plots, [FAIR, cluster.described()])


# --- thresholds ----------------------------------------------------------------------------


def sensitivity(lab: Lab) -> Findings:
    cluster = eight(lab, "hyperbolic")
    fixed = {
        "policy": "prism",
        "slo_scale": SLO_SCALE,
        "rate_scale": lab.pick(24.0, 4.0),
        "gpus.memory": "40GiB",
    }
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
        EIGHT + "; also on 40 GiB",
        "120 s of trace; the figure shows 1000 s",
        DATA + " Without the global scheduler, models go where most memory is free and are never "
        "moved, which the paper does not spell out.",
        fig10,
    ),
    Study(
        "prism-sensitivity",
        "Idle threshold and rate window",
        "Prism, idle threshold (§6.2) and its published version",
        EIGHT + ", 40 GiB per GPU, rate scale 24",
        "120 s of trace",
        DATA,
        sensitivity,
    ),
)
