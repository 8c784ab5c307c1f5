"""Terminal output of simulations."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from prism_replay.outcomes import SeedGroup
from prism_replay.report.console import attainment_table, latency_table, new_table, rates_table
from prism_replay.report.outcome_tables import tail_table
from prism_replay.report.page import percent
from prism_replay.results import ReplayResults
from prism_sim.output.results import SimResults
from prism_sim.sweeps.points import outcome_of

MODELS_SHOWN = 12
LINE_EVERY_S = 2.0
"""Time between lines of progress in a pipe."""


class Bar:
    """Progress bar on a terminal, and lines on stderr elsewhere. Call it with (done, total)."""

    def __init__(self, console: Console, label: str) -> None:
        self._label = label
        self._said_s = time.monotonic()
        self._bar = Progress(
            TextColumn(label),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(label, total=None)

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
        now_s = time.monotonic()
        if self._bar.disable and 0 < done < total and now_s >= self._said_s + LINE_EVERY_S:
            self._said_s = now_s
            print(f"{self._label}: {done} of {total}", file=sys.stderr, flush=True)


def print_run(console: Console, found: SimResults, replay: ReplayResults, since_s: float) -> None:
    """Prints the tables of one run. since_s: `time.perf_counter()` at its start."""
    if len(found.summary.models) <= MODELS_SHOWN:
        console.print(attainment_table(replay))
        console.print(latency_table(replay))
        console.print(rates_table(replay))
    else:
        console.print(tail_table([group_of(found)], ["policy"]))
    console.print(overview(found))
    wall_s = time.perf_counter() - since_s
    total = found.summary.total
    if found.prefix_hits:
        console.print(f"{percent(found.prefix_hits['total'])} of prompt tokens were cached")
    for code, count in total.errors.items():
        console.print(f"{count} requests ended with {code!r}")
    console.print(
        f"{total.requests} requests, {found.summary.duration_s:.0f} s simulated in {wall_s:.1f} s,"
        f" {found.events} events"
    )


def overview(*runs: SimResults) -> Table:
    """Returns a table of attainment over all requests, with a row per policy and SLO scale."""
    policies = [found.config.policy for found in runs]
    title = f"{', '.join(policies)} on {len(runs[0].gpus)} x {runs[0].config.gpus.type}"
    heads = ("SLO x", "TTFT", "TPOT", "E2E", "all", "GPU busy", "activations")
    table = new_table(title, *(("policy",) if len(runs) > 1 else ()), *heads)
    for found in runs:
        _add_rows(table, found, (found.config.policy,) if len(runs) > 1 else ())
    return table


def group_of(found: SimResults) -> SeedGroup:
    """Returns one run as a group of `tail_table`."""
    return SeedGroup({"policy": found.config.policy}, [outcome_of(found, {})])


def _add_rows(table: Table, found: SimResults, first: tuple[str, ...]) -> None:
    total = found.summary.total
    busy = sum(gpu.busy for gpu in found.gpus) / len(found.gpus)
    for scale, part in total.attainment.items():
        table.add_row(
            *first,
            scale,
            *(percent(value) for value in (part.ttft, part.tpot, part.e2e, part.all)),
            percent(busy),
            str(found.counts.get("active", 0)),
        )
