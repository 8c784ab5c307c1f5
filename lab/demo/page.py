"""HTML page of the demo: the cluster's actions with times and reasons, and SLO attainment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prism.scheduler.decision_journal import AnyRecord, Opened, Started, read
from prism_replay.report.page import environment
from prism_replay.results import ReplayResults, read_results, scale_key


@dataclass(frozen=True, slots=True)
class TimedAction:
    """One action of the cluster scheduler."""

    time_s: float
    """Time since the first request; negative before it."""
    what: str
    why: str


def write_page(out: Path, results_json: Path, journal: Path, report: Path) -> list[TimedAction]:
    """Writes `out` and returns the actions on it. Raises ConfigError if a file is not valid.

    Args:
        journal: Journal of the cluster scheduler. A missing file means an empty list of actions.
        report: Report of the replay, which the page links to.
    """
    results = read_results(results_json)
    records = list(read(journal)) if journal.exists() else []
    actions = list(actions_of(records, results.config.started_unix_s))
    page = environment("lab.demo", "prism_replay").get_template("demo.html")
    out.write_text(
        page.render(
            summary=results.summary,
            models=list(attainments(results)),
            actions=actions,
            report=report.name,
        ),
        encoding="utf-8",
    )
    return actions


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


def attainments(results: ReplayResults) -> Iterator[tuple[str, int, str]]:
    """Yields (model, requests, percentage of requests within their SLO)."""
    for name, group in results.summary.models.items():
        met = group.attainment[scale_key(1.0)].all
        yield name, group.requests, "-" if met is None else f"{met:.0%}"
