"""HTML page of the demo: the gain by sharing, memory over time, and what happened and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal

from lab.demo import losses, misses
from prism.config.schema.units import format_size
from prism.scheduler.decision_journal import AnyRecord, Opened, Started, read
from prism_replay.report.page import environment, percent
from prism_replay.results import GroupSummary, ReplayResults, read_results, scale_key

Side = Literal["shared", "fixed", "neither"]
OWN_TRACE = "demo.jsonl"


@dataclass(frozen=True, slots=True)
class Gain:
    """One figure with shared memory and with fixed shares."""

    name: str
    shared: str
    fixed: str
    better: Side
    """Side of the higher figure; neither if both are shown alike."""


@dataclass(frozen=True, slots=True)
class TimedAction:
    """One action of the cluster scheduler."""

    time_s: float
    """Time since the first request; negative before it."""
    what: str
    why: str


def write_page(
    out: Path, results_json: Path, journal: Path, report: Path, fixed_json: Path | None
) -> list[TimedAction]:
    """Writes `out` and returns the actions on it. Raises ConfigError if a file is not valid.

    Args:
        journal: Journal of the cluster scheduler. A missing file means an empty list of actions.
        report: Report of the replay, which the page links to.
        fixed_json: Results of the same trace with fixed shares of the memory. None: it was not
            replayed.
    """
    results = read_results(results_json)
    fixed = read_results(fixed_json) if fixed_json else None
    records = list(read(journal)) if journal.exists() else []
    actions = list(actions_of(records, results.config.started_unix_s))
    page = environment("lab.demo", "prism_replay").get_template("demo.html")
    out.write_text(
        page.render(
            summary=results.summary,
            need=format_size(need_bytes(results)),
            room=format_size(results.samples[-1].capacity_bytes) if results.samples else "-",
            gains=gains(results, fixed) if fixed else [],
            losses=[
                losses.sentence(subject, found)
                for subject, found in (("Shared memory", results), ("Fixed shares", fixed))
                if found
            ],
            own_trace=results.config.trace == OWN_TRACE,
            models=list(model_rows(results, fixed)),
            plots=memory_figures(results, fixed),
            actions=actions,
            report=report.name,
        ),
        encoding="utf-8",
    )
    return actions


def need_bytes(results: ReplayResults) -> int:
    """Returns the memory that the weights of all models would take at the same time."""
    found: dict[str, int] = {}
    for sample in results.samples:
        for memory in sample.devices.values():
            for name, size in memory.weights_bytes.items():
                found[name] = max(size, found.get(name, 0))
    return sum(found.values())


def gains(shared: ReplayResults, fixed: ReplayResults) -> list[Gain]:
    """Returns the figures that show what is gained by sharing. Neither side is better in memory."""
    figures = {
        "models served": _served,
        "requests answered": _answered,
        "requests within their SLO": _within,
    }
    found = []
    for name, figure in figures.items():
        (share, text), (fixed_share, fixed_text) = figure(shared), figure(fixed)
        better: Side = "shared" if share > fixed_share else "fixed"
        found.append(Gain(name, text, fixed_text, "neither" if text == fixed_text else better))
    return [*found, Gain("memory in use, on average", _held(shared), _held(fixed), "neither")]


def _served(results: ReplayResults) -> tuple[float, str]:
    models = results.summary.models.values()
    served = sum(group.completed > 0 for group in models)
    return served, f"{served} of {len(models)}"


def _answered(results: ReplayResults) -> tuple[float, str]:
    total = results.summary.total
    return total.completed / max(1, total.requests), f"{total.completed} of {total.requests}"


def _within(results: ReplayResults) -> tuple[float, str]:
    met = _met(results.summary.total)
    return met or 0.0, percent(met)


def _held(results: ReplayResults) -> str:
    samples = results.samples
    return format_size(int(fmean(s.resident_bytes for s in samples))) if samples else "-"


def _met(group: GroupSummary) -> float | None:
    return group.attainment[scale_key(1.0)].all


def memory_figures(shared: ReplayResults, fixed: ReplayResults | None) -> dict[str, str]:
    """Returns title -> SVG of the devices' memory over time."""
    from prism_replay.report import memory_plots, theme  # matplotlib takes a second to import

    found = {"shared": shared} | ({"fixed": fixed} if fixed else {})
    return theme.draw(
        {name: partial(memory_plots.of_devices, results) for name, results in found.items()}
    )


def model_rows(
    results: ReplayResults, fixed: ReplayResults | None
) -> Iterator[tuple[str, int, str, str, str]]:
    """Yields (model, requests, percentage within their SLO, the same with fixed shares, why the
    others missed it)."""
    why = misses.reasons(results)
    for name, group in results.summary.models.items():
        other = percent(_met(fixed.summary.models[name])) if fixed else "-"
        yield name, group.requests, percent(_met(group)), other, misses.in_words(why[name])


def actions_of(records: Sequence[AnyRecord], first_request_unix_s: float) -> Iterator[TimedAction]:
    """Yields the actions in the journal of the cluster scheduler, in order."""
    zero_s = 0.0
    for record in records:
        if isinstance(record, Opened):  # converts the journal's clock to the replay's
            zero_s = record.time_s + first_request_unix_s - record.unix_s
        elif isinstance(record, Started):
            yield TimedAction(record.time_s - zero_s, describe(record), record.reason)


def describe(action: Started) -> str:
    text = {
        "activate": "{0.model} is activated on {0.device}",
        "evict": "{0.model} is evicted from {0.device}",
        "migrate": "{0.model} migrates from {0.device} to {0.target}",
        "drop_copy": "{0.model}'s second copy is removed from {0.device}",
    }
    return text[action.kind].format(action)
