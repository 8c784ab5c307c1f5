"""Self-contained HTML report on one page, in dark and light colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from prism_replay.results import (
    LABELS,
    Attainment,
    GroupSummary,
    Latency,
    ReplayResults,
    Throughput,
    scale_key,
)

LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "End to end"}
RATE_HEADS = ("model", "req/s", "req/s active", "tok/s", "tok/s active", "active", "E2E / alone")
"""Heads of throughput, with idle time and without it, and of the normalised latency."""


def write_report(results: ReplayResults, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(results), encoding="utf-8")


def render(results: ReplayResults) -> str:
    page = environment("prism_replay").get_template("report.html")
    return page.render(**sections(results), counters=results.counters)


def environment(*packages: str) -> jinja2.Environment:
    """Returns the templates of `packages`; an earlier package's template takes precedence."""
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package) for package in packages]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def sections(results: ReplayResults) -> dict[str, Any]:
    from prism_replay.report.plots import all_plots  # matplotlib takes a second to import

    return {
        "config": results.config,
        "summary": results.summary,
        "cards": cards(results),
        "scales": [scale_key(scale) for scale in results.config.slo_scales],
        "metrics": list(LABELS.items()),
        "attainment": attainment_rows(results),
        "latency": latency_rows(results),
        "rate_heads": RATE_HEADS,
        "rates": rate_rows(results),
        "errors": results.summary.total.errors,
        "plots": all_plots(results),
    }


def cards(results: ReplayResults) -> list[tuple[str, str, str]]:
    """Returns (label, value, note) of each figure at the top."""
    summary, total = results.summary, results.summary.total
    failed = total.requests - total.completed
    found = [attainment_card(total, scale_key(results.config.main_scale))]
    found += [
        ("requests", f"{total.requests}", f"{failed} failed" if failed else "none failed"),
        (
            "output tokens",
            f"{summary.output_tokens_per_s:.1f} tok/s",
            f"in {summary.duration_s:.0f} s",
        ),
        ("P95 TTFT", milliseconds(total.ttft_ms.p95), f"P50 {milliseconds(total.ttft_ms.p50)}"),
        ("P95 TPOT", milliseconds(total.tpot_ms.p95), f"P50 {milliseconds(total.tpot_ms.p50)}"),
    ]
    if results.counters and results.counters.maps:
        found.append(("page maps", f"{summary.maps_per_minute:.0f}/min", _unmaps(results)))
    return found


def attainment_card(total: GroupSummary, main: str) -> tuple[str, str, str]:
    """Returns the card of the attainment at the main scale; its note has the other scales."""
    others = [
        f"{percent(value.all)} at x{scale}"
        for scale, value in total.attainment.items()
        if scale != main
    ]
    value = percent(total.attainment[main].all)
    return f"SLO attainment, x{main}", value, ", ".join(others) or "TTFT, TPOT and E2E together"


def attainment_rows(results: ReplayResults) -> list[tuple[str, int, list[list[str]]]]:
    """Returns (model, requests, cells in the order of LABELS per scale), the total last."""
    return [
        (name, group.requests, [_cells(found) for found in group.attainment.values()])
        for name, group in results.summary.groups.items()
    ]


def latency_rows(results: ReplayResults) -> list[tuple[str, int, list[str]]]:
    """Returns (model, output tokens, mean/P50/P95/P99 of LATENCIES), the total last."""
    return [
        (name, group.output_tokens, [c for key in LATENCIES for c in _times(getattr(group, key))])
        for name, group in results.summary.groups.items()
    ]


def rate_rows(results: ReplayResults) -> list[list[str]]:
    """Returns the cells under RATE_HEADS of each model, the total last."""
    return [
        [name, *rate_cells(group.throughput, group.normalized_latency)]
        for name, group in results.summary.groups.items()
    ]


def rate_cells(found: Throughput, normalized_latency: float | None) -> list[str]:
    """Returns the cells under RATE_HEADS without the model."""
    rates = (
        found.requests_per_s,
        found.requests_per_active_s,
        found.output_tokens_per_s,
        found.output_tokens_per_active_s,
    )
    shown_s = "-" if found.active_s is None else f"{found.active_s:.1f} s"
    return [*map(factor, rates), shown_s, factor(normalized_latency)]


def factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    """Returns a percentage with one decimal; 100 % and 0 % only where they are exact."""
    if value is None:
        return "-"
    shown = round(value * 100, 1)
    if 0 < value < 1:
        shown = min(max(shown, 0.1), 99.9)
    return f"{shown:.1f} %"


def milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.0f} ms"


def _cells(found: Attainment) -> list[str]:
    return [percent(getattr(found, metric)) for metric in LABELS]


def _times(found: Latency) -> list[str]:
    return [milliseconds(value) for value in (found.mean, found.p50, found.p95, found.p99)]


def _unmaps(results: ReplayResults) -> str:
    return f"unmaps {results.summary.unmaps_per_minute:.0f}/min"
