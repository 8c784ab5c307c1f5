"""Prism's Figure 10, and the effect of its thresholds (§6.2, §7.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lab.papers.prism.prism_setup import FAIR, Cluster
from lab.papers.prism.prism_sweeps import OSDI, SLO_SCALES, TPOT_SCALES, held_rate, several
from lab.papers.study import findings
from lab.papers.study.findings import Findings, Plot, Statement
from lab.papers.study.lab import Lab
from lab.papers.study.lines import Lines, row
from lab.papers.study.sources import STYLES
from lab.papers.study.trial import Trial, TrialOutcome
from lab.papers.study.tuning import Settings

Traces = Sequence[TrialOutcome]
"""Outcomes of one setting, one for each trace."""

# --- Figure 10 -----------------------------------------------------------------------------

GLOBAL: dict[str, tuple[str, dict[str, Any]]] = {
    "with": ("", {}),
    "without": ("no-global", {}),
    "without, models in order": ("in-order", {}),
    "with all moves": ("", {"scheduler.contended_requests": 0.0}),
}
"""Name -> (variant, changes). The gain depends on the placement without the scheduler: models
placed by free memory are already spread, models placed in listed order are not. "With all moves"
is Algorithm 1 by rates only, restricted to devices with enough free memory."""
LISTED = "the first four models on one GPU, the others on the other"
ALL = "every move that Algorithm 1 finds by rates and that has room"
TPOT_SCALE = 2.0
"""SLO scale of TPOT in §7.5, tighter than in Figure 7."""


def fig10(lab: Lab) -> Findings:
    """Runs Figure 10 at the highest load at which Prism has 99 % TTFT, and at 1.5 times that."""
    bars: Lines = {name: [] for name in GLOBAL}
    plot = Plot("TTFT attainment", "", "TTFT attainment (%)", bars, bars=True)
    study = Findings([], [], {"ttft": plot}, [FAIR])
    for style in STYLES:
        clusters, scale = several(lab, style), SLO_SCALES[style]
        load = held_rate(lab, clusters[0], {"slo_scale": scale})
        study.budget.append(f"{style}: {clusters[0].described()}")
        for rate in (load, 1.5 * load):
            where = f"{style}, rate scale {rate:g}"
            fixed = {"policy": "prism", "slo_scale": scale, "rate_scale": rate}
            judge = TPOT_SCALE / TPOT_SCALES[style]
            found = {
                name: _on_all(lab, clusters, {**fixed, **changes}, variant, judge)
                for name, (variant, changes) in GLOBAL.items()
            }
            study.comparisons.extend(_gains(where, judge, found))
            for name, traces in found.items():
                bars[name].append((where, _mean(_each(traces, "ttft", judge))))
                study.rows.extend(
                    row(o, scheduler=name, load=where, trace=i) for i, o in enumerate(traces)
                )
    return study


def _on_all(
    lab: Lab, clusters: Sequence[Cluster], settings: Settings, variant: str = "", judge: float = 1.0
) -> Traces:
    """Runs the setting on all traces.

    Args:
        judge: Additional SLO scale at which attainment is measured.
    """
    scales = (1.0, judge)
    return lab.run([Trial(c.config, dict(settings), scales, variant) for c in clusters])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _each(traces: Traces, metric: str, judge: float) -> list[float]:
    """Returns the attainment of each trace in percent, of TPOT at SLO scale `judge`."""
    judged = f"{judge:g}" if metric == "tpot" else "1"
    return [100 * o.attainment(metric, judged) for o in traces]


def spread(values: Sequence[float | None], unit: str) -> str:
    """Returns a text with the range over the traces; "" for fewer than two."""
    known = [v for v in values if v is not None]
    if len(known) < 2:
        return ""
    return f" ({min(known):.2f}{unit} to {max(known):.2f}{unit} over {len(known)} traces)"


def _gains(where: str, judge: float, found: Mapping[str, Traces]) -> list[Statement]:
    compared = []
    for metric in ("ttft", "tpot"):
        each = {name: _each(traces, metric, judge) for name, traces in found.items()}
        shares = {name: _mean(values) for name, values in each.items()}
        gain = findings.ratio(shares["with"], shares["without"])
        what = f"{where}: {metric.upper()} attainment with over without the global scheduler"
        whole = findings.factor(what, gain, None, "§7.4, Figure 10 (a)")
        pairs = zip(each["with"], each["without"], strict=True)
        apart = spread([findings.ratio(a, b) for a, b in pairs], "x")
        compared.append(msgspec.structs.replace(whole, ours=whole.ours + apart))
        every = findings.ratio(shares["with all moves"], shares["without"])
        if whole.agrees is False:
            listed = findings.ratio(shares["with"], shares["without, models in order"])
            compared.append(findings.cause(f"{what}, {LISTED}", gain, listed))
            compared.append(findings.cause(f"{what}, {ALL}", gain, every))
        else:
            compared.append(findings.unpublished(f"{what}, {ALL}", every, "§6.2, Algorithm 1"))
    return compared


# --- thresholds ----------------------------------------------------------------------------


def sensitivity(lab: Lab) -> Findings:
    clusters, scale = several(lab, "hyperbolic"), SLO_SCALES["hyperbolic"]
    load = 1.5 * held_rate(lab, clusters[0], {"slo_scale": scale})
    fixed = {"policy": "prism", "slo_scale": scale, "rate_scale": load}

    def with_(key: str, seconds: Sequence[int]) -> dict[int, Traces]:
        changes = {s: {f"scheduler.{key}": f"{s}s"} for s in seconds}
        return {s: _on_all(lab, clusters, {**fixed, **change}) for s, change in changes.items()}

    by_idle = with_("idle_threshold", lab.pick((5, 20, 45, 90), (20, 45)))
    by_window = with_("rate_window", lab.pick((15, 60, 240), (60,)))
    study = Findings(_thresholds(by_idle, by_window), [], {}, [FAIR, clusters[0].described()])
    named = (("idle", "Idle threshold", by_idle), ("window", "Rate window", by_window))
    for name, title, found in named:
        means: Lines = {"prism": [(s, _mean(each)) for s, each in _ttfts_ms(found).items()]}
        study.plots[name] = Plot(title, "s", "mean TTFT (ms)", means)
        study.rows.extend(
            row(o, threshold=name, seconds=s, trace=i)
            for s, traces in found.items()
            for i, o in enumerate(traces)
        )
    return study


def _thresholds(by_idle: Mapping[int, Traces], by_window: Mapping[int, Traces]) -> list[Statement]:
    usual = by_idle[45]
    minutes = sum(o.window_s for o in usual) / 600
    activated = sum(o.counts.get("active", 0) - len(o.models) for o in usual)
    migrated = sum(o.counts.get("migrated", 0) for o in usual)
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


def _ttfts_ms(found: Mapping[int, Traces]) -> dict[int, list[float]]:
    """Returns setting -> mean TTFT of each trace."""
    summaries = {s: [o.summary for o in traces if o.summary] for s, traces in found.items()}
    return {s: [one.total.ttft_ms.mean or 0.0 for one in each] for s, each in summaries.items()}


def _shown(ttfts_ms: Mapping[int, Sequence[float]]) -> str:
    return ", ".join(
        f"{s} s {_mean(each):.0f} ms{spread(each, ' ms')}" for s, each in ttfts_ms.items()
    )


def best_idle(ttfts_ms: Mapping[int, Sequence[float]]) -> Statement:
    # Negated: `findings.best` looks for the largest figure.
    faster = {f"{s} s": -_mean(each) for s, each in ttfts_ms.items()}
    what = "45 s of idle time has the shortest mean TTFT of the thresholds tried"
    source, said = f"A.4, Figure 15 (a), {OSDI}", "best at about 45 s"
    return findings.best(what, "45 s", faster, said, source, shown=_shown(ttfts_ms))


def robust(ttfts_ms: Mapping[int, Sequence[float]]) -> Statement:
    means = [_mean(each) for each in ttfts_ms.values()]
    apart = findings.ratio(max(means), min(means)) if len(means) > 1 else None
    return findings.claim(
        "mean TTFT is robust to the window for rates",
        None if apart is None else apart <= ROBUST,
        _shown(ttfts_ms) if apart is None else f"{apart:.2f}x apart: {_shown(ttfts_ms)}",
        "generally robust, stable at about 60 s",
        f"A.4, Figure 15 (b), {OSDI}",
    )
