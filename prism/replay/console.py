"""What the terminal shows: live progress, the result tables, a trace's statistics."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from prism.replay.metrics import meets_all
from prism.replay.report import milliseconds, percent
from prism.replay.results import GroupSummary, RequestRecord, Results
from prism.replay.stats import TraceStats
from prism.replay.trace import TraceRequest
from prism.replay.trace_report import published, ratio

ROLLING_REQUESTS = 50
PLAIN_INTERVAL_S = 10.0


class LiveProgress:
    """Follows a replay: a live bar on a terminal, one line each 10 s elsewhere.

    The attainment shown is that of the last 50 answers, all SLOs together, at one scale.
    """

    def __init__(self, console: Console, requests: int, scale: float) -> None:
        self.console, self.requests, self.scale = console, requests, scale
        self.sent_count = self.done_count = self.error_count = 0
        self.recent: deque[bool] = deque(maxlen=ROLLING_REQUESTS)
        self.printed_s = time.monotonic()
        self.bar = Progress(
            BarColumn(bar_width=16),
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
        verdict = meets_all(record, self.scale)
        if verdict is not None:
            self.recent.append(verdict)
        self._show()

    @property
    def state(self) -> str:
        rolling = percent(sum(self.recent) / len(self.recent)) if self.recent else "-"
        return (
            f"sent {self.sent_count}, done {self.done_count} of {self.requests}, "
            f"errors {self.error_count}, attainment {rolling}"
        )

    def _show(self) -> None:
        self.bar.update(self.task, completed=self.done_count, state=self.state)
        now_s = time.monotonic()
        if not self.console.is_terminal and now_s - self.printed_s >= PLAIN_INTERVAL_S:
            self.printed_s = now_s
            self.console.print(self.state)


def print_results(console: Console, results: Results) -> None:
    """Attainment at each SLO scale, latencies, and the server's counters."""
    console.print(attainment_table(results))
    console.print(latency_table(results))
    summary, total = results.summary, results.summary.total
    console.print(
        f"{total.completed} of {total.requests} requests finished in {summary.duration_s:.1f} s, "
        f"{summary.output_tokens_per_s:.1f} output tokens/s, "
        f"send lag P99 {summary.send_lag_p99_ms:.1f} ms"
    )
    for code, count in total.errors.items():
        message = next(r.message for r in results.records if r.error == code)
        console.print(f"[red]{count} x {code}[/red], such as: ", end="")
        console.print(message, markup=False)
    if results.counters is None:
        console.print("the server has no /status: no page or activation counters")
        return
    grown = results.counters
    console.print(
        f"maps {grown.maps} ({summary.maps_per_minute:.0f}/min), unmaps {grown.unmaps} "
        f"({summary.unmaps_per_minute:.0f}/min), activations {grown.activations}, evictions "
        f"{grown.evictions}, migrations {grown.migrations}, retractions {grown.retractions}, "
        f"engine restarts {grown.engine_restarts}"
    )


def attainment_table(results: Results) -> Table:
    """A row per model and SLO scale; narrow enough for 80 columns."""
    table = Table(title="SLO attainment (% of requests)")
    for column in ("model", "requests", "errors", "SLO x", "TTFT", "TPOT", "E2E", "all"):
        table.add_column(column, **_column(column))
    for name, group in _groups(results).items():
        heads = [name, str(group.requests), str(group.requests - group.completed)]
        last = len(group.attainment) - 1
        for number, (scale, found) in enumerate(group.attainment.items()):
            values = (found.ttft, found.tpot, found.e2e, found.all)
            cells = (percent(value).removesuffix(" %") for value in values)
            table.add_row(*heads, scale, *cells, end_section=number == last)
            heads = ["", "", ""]
    return table


def latency_table(results: Results) -> Table:
    """A row per model and latency."""
    table = Table(title="Latency of finished requests")
    for column in ("model", "", "mean", "P50", "P95", "P99"):
        table.add_column(column, **_column(column))
    for name, group in _groups(results).items():
        rows = {"TTFT": group.ttft_ms, "TPOT": group.tpot_ms, "E2E": group.e2e_ms}
        for label, found in rows.items():
            values = (found.mean, found.p50, found.p95, found.p99)
            head = name if label == "TTFT" else ""
            cells = (milliseconds(value) for value in values)
            table.add_row(head, label, *cells, end_section=label == "E2E")
    return table


def print_stats(console: Console, stats: TraceStats) -> None:
    """The statistics of Prism §3.1 with the published values beside them."""
    table = Table(title=f"{stats.requests} requests in {stats.duration_s:.0f} s")
    columns = "model,share,rate CV,gap CV,idles per h,median idle,idle,active"
    for column in columns.split(","):
        table.add_column(column, **_column(column))
    for model in stats.models:
        table.add_row(
            model.model,
            percent(model.share),
            ratio(model.rate_cv),
            ratio(model.gap_cv),
            f"{model.idle_per_hour:.0f}",
            "-" if model.median_idle_s is None else f"{model.median_idle_s:.0f} s",
            percent(model.idle_time),
            percent(model.active_time),
        )
    console.print(table)
    console.print(summary_table(stats))


def summary_table(stats: TraceStats) -> Table:
    table = Table(title="All models, and what Prism reports of production traces")
    for column in ("statistic", "here", "published"):
        table.add_column(column, **_column(column))
    for row in published(stats):
        table.add_row(*row)
    return table


def _column(name: str) -> dict[str, Any]:
    """Names stay whole and on the left, numbers stand on the right."""
    named = name in {"model", "statistic"}
    return {"justify": "left" if named else "right", "no_wrap": named}


def _groups(results: Results) -> dict[str, GroupSummary]:
    return {**results.summary.models, "total": results.summary.total}
