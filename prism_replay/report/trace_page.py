"""HTML page about a trace: figures and statistics, compared with those of Prism §3.1."""

from __future__ import annotations

from pathlib import Path

from prism.errors import TraceError
from prism_replay.report.page import environment, percent
from prism_replay.report.stats import ACTIVE_WINDOW_S, IDLE_S, ModelStats, TraceStats
from prism_replay.trace import Trace

MODELS_SHOWN = 200
HEADS = (
    "model",
    "requests",
    "share",
    "rate CV",
    "gap CV",
    "idles per h",
    "median idle",
    "idle",
    "active",
    "input",
    "output",
)
EXPLAINED = (
    f"idle: part of the time in gaps of more than {IDLE_S:g} s between requests. active: part of"
    f" the time with a request in the last {ACTIVE_WINDOW_S / 60:g} minutes. A model can be both at"
    " the same time. CV: standard deviation / mean, of requests per minute (rate) and of times"
    " between requests (gap). -: not defined, such as the CV of a single value."
)


def write_page(name: str, trace: Trace, stats: TraceStats, path: Path) -> None:
    """Writes the page. Raises TraceError if the file cannot be written."""
    try:
        path.write_text(render(name, trace, stats), encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}") from error


def render(name: str, trace: Trace, stats: TraceStats) -> str:
    from prism_replay.report.trace_plots import trace_plots  # matplotlib takes a second to import

    page = environment("prism_replay").get_template("trace.html")
    return page.render(
        name=name,
        stats=stats,
        rows=comparison_rows(stats),
        heads=HEADS,
        models=[model_cells(model) for model in stats.models[:MODELS_SHOWN]],
        plots=trace_plots(trace, stats),
        explained=EXPLAINED,
    )


def model_cells(model: ModelStats) -> list[str]:
    """Returns a model's row, in the order of HEADS."""
    return [
        model.model,
        str(model.requests),
        percent(model.share),
        ratio(model.rate_cv),
        ratio(model.gap_cv),
        f"{model.idle_per_hour:.0f}",
        "-" if model.median_idle_s is None else f"{model.median_idle_s:.0f} s",
        percent(model.idle_time),
        percent(model.active_time),
        f"{model.input_tokens / model.requests:.0f}",
        f"{model.output_tokens / model.requests:.0f}",
    ]


def comparison_rows(stats: TraceStats) -> list[tuple[str, str, str]]:
    """Returns (statistic, its value here, the value that Prism reports for production traces)."""
    return [
        ("requests from the last 60 % of models", percent(stats.tail_share), "about 25 %"),
        ("models with CV of req/min above 0.5", percent(stats.rate_cv_above_half), "many"),
        ("models with CV of req/min above 1", percent(stats.rate_cv_above_1), "many, of 2 traces"),
        ("models with median idle above 30 s", percent(stats.median_idle_above_30_s), "many"),
        (
            "models with median idle above 80 s",
            percent(stats.median_idle_above_80_s),
            "0 to > 50 %",
        ),
        ("models with over 40 idles per hour", percent(stats.idle_per_hour_above_40), "0-50 %"),
        ("models idle over 70 % of the time", percent(stats.idle_time_above_70), "100 % (Novita)"),
        ("models active at a time, mean", percent(stats.active_mean), "23-50 %"),
        ("models active at a time, P10", percent(stats.active_p10), ""),
        ("models active at a time, P90", percent(stats.active_p90), ""),
        ("changes of the active set per hour", f"{stats.active_changes_per_hour:.0f}", "54-766"),
        ("correlation of a model's days", ratio(stats.day_correlation), "near 0"),
    ]


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
