"""Prism's Figure 10, and the effect of its thresholds (§6.2, §7.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.papers.prism.prism_setup import FAIR
from lab.papers.prism.prism_sweeps import (
    EIGHT,
    OSDI,
    SLO_SCALES,
    TPOT_SCALES,
    held_rate,
    with_models,
)
from lab.papers.study import findings
from lab.papers.study.findings import Findings, Plot, Statement
from lab.papers.study.lab import Lab
from lab.papers.study.lines import Lines, row
from lab.papers.study.sources import STYLES
from lab.papers.study.trial import Trial, TrialOutcome

# --- Figure 10 -----------------------------------------------------------------------------

GLOBAL: dict[str, tuple[str, dict[str, Any]]] = {
    "with": ("", {}),
    "without": ("", {"policy": "prism-free-memory"}),
    "without, models in order": ("in-order", {}),
    "with all moves": ("", {"scheduler.contended_requests": 0.0}),
}
"""Name -> (variant, changes). The gain depends on the placement without the scheduler: models
placed by free memory are already spread, models placed in listed order are not. "With all moves"
is Algorithm 1 by rates only, restricted to devices with enough free memory."""
LISTED = "the first four models on one GPU, the others on the other"
ALL = "every move that Algorithm 1 finds by rates and that has room"
LOADS = (1.0, 1.5)
"""Parts of the highest load at which Prism has 99 % TTFT."""
TPOT_SCALE = 2.0
"""SLO scale of TPOT in §7.5, tighter than in Figure 7."""


def fig10(lab: Lab) -> Findings:
    """Runs Figure 10 at the highest load at which Prism has 99 % TTFT, and at 1.5 times that."""
    bars: Lines = {name: [] for name in GLOBAL}
    plot = Plot("TTFT attainment", "", "TTFT attainment (%)", bars, bars=True)
    study = Findings([], [], {"ttft": plot}, [FAIR])
    for style in STYLES:
        cluster, scale = with_models(lab, f"eight-{style}", style, EIGHT), SLO_SCALES[style]
        load = held_rate(lab, cluster, {"slo_scale": scale})
        study.budget.append(f"{style}: {cluster.described()}; the load is rate scale {load:g}")
        for part in LOADS:
            where = f"{style}, {part:g} times the load"
            fixed = {"policy": "prism", "slo_scale": scale, "rate_scale": part * load}
            judge = TPOT_SCALE / TPOT_SCALES[style]
            trials = trials_of(cluster.config, fixed, judge)
            found = dict(zip(GLOBAL, lab.run(trials), strict=True))
            study.comparisons.extend(_gains(where, judge, found))
            for name, outcome in found.items():
                bars[name].append((where, 100 * outcome.attainment("ttft", "1")))
                study.rows.append(row(outcome, scheduler=name, load=where))
    return study


def trials_of(config: str, fixed: Mapping[str, Any], judge: float) -> list[Trial]:
    """Returns a point for each entry of GLOBAL."""
    return [
        Trial(config, {**fixed, **changes}, (1.0, judge), variant=variant)
        for variant, changes in GLOBAL.values()
    ]


def _gains(where: str, judge: float, found: Mapping[str, TrialOutcome]) -> list[Statement]:
    """Compares attainments, of TPOT at SLO scale `judge`."""
    compared = []
    for metric, scale in (("ttft", "1"), ("tpot", f"{judge:g}")):
        shares = {name: outcome.attainment(metric, scale) for name, outcome in found.items()}
        gain = findings.ratio(shares["with"], shares["without"])
        what = f"{where}: {metric.upper()} attainment with over without the global scheduler"
        compared.append(findings.factor(what, gain, None, "§7.4, Figure 10 (a)"))
        every = findings.ratio(shares["with all moves"], shares["without"])
        if compared[-1].agrees is False:
            listed = findings.ratio(shares["with"], shares["without, models in order"])
            compared.append(findings.cause(f"{what}, {LISTED}", gain, listed))
            compared.append(findings.cause(f"{what}, {ALL}", gain, every))
        else:
            compared.append(findings.unpublished(f"{what}, {ALL}", every, "§6.2, Algorithm 1"))
    return compared


# --- thresholds ----------------------------------------------------------------------------


def sensitivity(lab: Lab) -> Findings:
    scale = SLO_SCALES["hyperbolic"]
    cluster = with_models(lab, "eight-hyperbolic", "hyperbolic", EIGHT)
    load = LOADS[-1] * held_rate(lab, cluster, {"slo_scale": scale})
    fixed = {"policy": "prism", "slo_scale": scale, "rate_scale": load}

    def with_(key: str, seconds: Sequence[int]) -> dict[int, TrialOutcome]:
        changes = [{f"scheduler.{key}": f"{s}s"} for s in seconds]
        trials = [Trial(cluster.config, {**fixed, **change}) for change in changes]
        return dict(zip(seconds, lab.run(trials), strict=True))

    by_idle = with_("idle_threshold", lab.pick((5, 20, 45, 90), (20, 45)))
    by_window = with_("rate_window", lab.pick((15, 60, 240), (60,)))
    study = Findings(_thresholds(by_idle, by_window), [], {}, [FAIR, cluster.described()])
    named = (("idle", "Idle threshold", by_idle), ("window", "Rate window", by_window))
    for name, title, found in named:
        means: Lines = {"prism": list(_ttfts_ms(found).items())}
        study.plots[name] = Plot(title, "s", "mean TTFT (ms)", means)
        study.rows.extend(row(o, threshold=name, seconds=s) for s, o in found.items())
    return study


def _thresholds(
    by_idle: Mapping[int, TrialOutcome], by_window: Mapping[int, TrialOutcome]
) -> list[Statement]:
    usual = by_idle[45]
    minutes = usual.window_s / 600
    activated = usual.counts.get("active", 0) - len(usual.models)
    migrated = usual.counts.get("migrated", 0)
    moved = "activations in 10 minutes at 45 s, beyond the first of each model and for migrations"
    source = f"§7.5, {OSDI}"
    return [
        best_idle(_ttfts_ms(by_idle)),
        robust(_ttfts_ms(by_window)),
        findings.value(moved, (activated - migrated) / minutes, 2, source),
        findings.value("migrations in 10 minutes at 45 s", migrated / minutes, 3, source),
    ]


ROBUST = 1.1
"""Largest ratio of mean TTFTs that counts as robust; the paper does not define it."""


def _ttfts_ms(found: Mapping[int, TrialOutcome]) -> dict[int, float | None]:
    return {s: o.summary.total.ttft_ms.mean if o.summary else None for s, o in found.items()}


def best_idle(ttfts_ms: Mapping[int, float | None]) -> Statement:
    found = {f"{s} s": ms for s, ms in ttfts_ms.items()}
    what = "45 s of idle time has the shortest mean TTFT of the thresholds tried"
    source, said = f"A.4, Figure 15 (a), {OSDI}", "best at about 45 s"
    return findings.best(what, "45 s", found, said, source, unit="ms", smaller=True)


def robust(ttfts_ms: Mapping[int, float | None]) -> Statement:
    known = [ms for ms in ttfts_ms.values() if ms is not None]
    apart = findings.ratio(max(known), min(known)) if len(known) > 1 else None
    return findings.claim(
        "mean TTFT is robust to the window for rates",
        None if apart is None else apart <= ROBUST,
        {"x apart": apart, **{f"ms at {s} s": ms for s, ms in ttfts_ms.items()}},
        "generally robust, stable at about 60 s",
        f"A.4, Figure 15 (b), {OSDI}",
    )
