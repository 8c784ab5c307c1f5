"""Terminal output: live progress, result tables and a trace's statistics."""

from __future__ import annotations

import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from prism_replay.base_slos import BaseSlos
from prism_replay.metrics import attainment, columns
from prism_replay.report.page import RATE_HEADS, milliseconds, percent, rate_rows
from prism_replay.report.stats import TraceStats
from prism_replay.report.trace_page import EXPLAINED, HEADS, comparison_rows, model_cells
from prism_replay.results import ReplayResults, RequestRecord
from prism_replay.trace import TraceRequest

ROLLING_REQUESTS = 50
PLAIN_INTERVAL_S = 10.0
SHOWN_FIGURES = 7
"""Number of a model's statistics to print; fits 80 columns."""


class LiveProgress:
    """Progress of a replay: a bar on a terminal, otherwise a line every 10 s.

    Shows the attainment of all SLOs together over the last 50 responses, at one scale, and how
    many responses these are.
    """

    def __init__(self, console: Console, requests: int, scale: float) -> None:
        self.console, self.requests, self.scale = console, requests, scale
        self.sent_count = self.done_count = self.error_count = 0
        self.recent: deque[bool] = deque(maxlen=ROLLING_REQUESTS)
        self.printed_s = time.monotonic()
        self.bar = Progress(
            BarColumn(bar_width=8),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=2,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("replay", total=requests, state="")

    def __enter__(self) -> LiveProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def sent(self, request: TraceRequest) -> None:
        self.sent_count += 1
        self._show()

    def done(self, record: RequestRecord) -> None:
        self.done_count += 1
        self.error_count += not record.ok
        found = attainment(columns([record], [record.model], {}), self.scale).all
        if found is not None:
            self.recent.append(bool(found))
        self._show()

    @property
    def recent_label(self) -> str:
        return f"last {len(self.recent)} within SLO" if self.recent else "within SLO"

    @property
    def state(self) -> str:
        rolling = percent(sum(self.recent) / len(self.recent)) if self.recent else "-"
        return (
            f"sent {self.sent_count}, done {self.done_count} of {self.requests}, "
            f"errors {self.error_count}, {self.recent_label} {rolling}"
        )

    def _show(self) -> None:
        self.bar.update(self.task, completed=self.done_count, state=self.state)
        now_s = time.monotonic()
        if not self.console.is_terminal and now_s - self.printed_s >= PLAIN_INTERVAL_S:
            self.printed_s = now_s
            self.console.print(self.state)


def print_results(console: Console, results: ReplayResults) -> None:
    """Prints attainment at each SLO scale, latencies, throughput and the server's counters."""
    console.print(attainment_table(results))
    console.print(latency_table(results))
    console.print(rates_table(results))
    summary, total = results.summary, results.summary.total
    console.print(
        f"{total.completed} of {total.requests} requests finished in {summary.duration_s:.1f} s, "
        f"{summary.output_tokens_per_s:.1f} output tokens/s, "
        f"send lag P99 {summary.send_lag_p99_ms:.1f} ms"
    )
    for code, count in total.errors.items():
        message = next(r.message for r in results.records if r.error == code)
        console.print(f"[red]{count} x {code}[/red], for example: ", end="")
        console.print(message, markup=False)
    if results.counters is None:
        reason = "the server does not have /status"
        if results.config.sent_slo_scale:  # it is Prism
            reason = "/status needs an operator's key, and --status-url if frontend.admin is set"
        console.print(f"no page or activation counters: {reason}")
        return
    grown = results.counters
    console.print(
        f"maps {grown.maps} ({summary.maps_per_minute:.0f}/min), unmaps {grown.unmaps} "
        f"({summary.unmaps_per_minute:.0f}/min), activations {grown.activations}, evictions "
        f"{grown.evictions}, migrations {grown.migrations}, retractions {grown.retractions}, "
        f"engine restarts {grown.engine_restarts}"
    )


def attainment_table(results: ReplayResults) -> Table:
    """Returns a table with a row per model and SLO scale, at most 80 columns wide."""
    columns = ("model", "requests", "errors", "SLO x", "TTFT", "TPOT", "E2E", "all")
    table = new_table("SLO attainment (% of requests)", *columns)
    for name, group in results.summary.groups.items():
        heads = [name, str(group.requests), str(group.requests - group.completed)]
        last = len(group.attainment) - 1
        for number, (scale, found) in enumerate(group.attainment.items()):
            values = (found.ttft, found.tpot, found.e2e, found.all)
            cells = (percent(value).removesuffix(" %") for value in values)
            table.add_row(*heads, scale, *cells, end_section=number == last)
            heads = ["", "", ""]
    return table


def latency_table(results: ReplayResults) -> Table:
    table = new_table("Latency of finished requests", "model", "", "mean", "P50", "P95", "P99")
    for name, group in results.summary.groups.items():
        rows = {"TTFT": group.ttft_ms, "TPOT": group.tpot_ms, "E2E": group.e2e_ms}
        for label, found in rows.items():
            values = (found.mean, found.p50, found.p95, found.p99)
            head = name if label == "TTFT" else ""
            cells = (milliseconds(value) for value in values)
            table.add_row(head, label, *cells, end_section=label == "E2E")
    return table


def rates_table(results: ReplayResults) -> Table:
    """Returns a table of throughput, with idle time and without it, and of normalised latency."""
    table = new_table("Throughput and normalised latency (E2E / alone)", *RATE_HEADS)
    for cells in rate_rows(results):
        table.add_row(*cells)
    return table


def base_slos_table(found: BaseSlos) -> Table:
    """Returns a table of latencies on dedicated devices."""
    heads = ("requests", "P95 TTFT", "P95 TPOT", "P95 E2E", "mean E2E alone")
    table = new_table("Latencies of each model alone", "model", *heads)
    for name, base in found.models.items():
        times_ms = (base.ttft_ms, base.tpot_ms, base.e2e_ms, base.execution_ms)
        table.add_row(name, str(base.requests), *map(milliseconds, times_ms))
    return table


def print_stats(console: Console, stats: TraceStats) -> None:
    """Prints the statistics of Prism §3.1, compared with the published values."""
    title = f"{stats.requests} requests in {stats.duration_s:.0f} s"
    name, _, *rest = HEADS
    models = new_table(title, name, *rest[:SHOWN_FIGURES])
    for model in stats.models:
        name, _, *cells = model_cells(model)
        models.add_row(name, *cells[:SHOWN_FIGURES])
    console.print(models)
    console.print(EXPLAINED, highlight=False)
    title = "All models, compared with production traces (Prism)"
    summary = new_table(title, "statistic", "here", "published")
    for row in comparison_rows(stats):
        summary.add_row(*row)
    console.print(summary)


def new_table(title: str | None, *columns: str) -> Table:
    """Returns a table in which names are left-aligned and not wrapped, numbers right-aligned."""
    table = Table(title=title)
    for column in columns:
        named = column in {"model", "statistic"}
        table.add_column(column, justify="left" if named else "right", no_wrap=named)
    return table
