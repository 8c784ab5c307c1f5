"""The page that ends the demo: what the cluster did, when and why, and what users got."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prism.scheduler.journal import AnyRecord, Opened, Started, read
from prism_replay.report.page import environment
from prism_replay.results import ReplayResults, read_results, scale_key


@dataclass(frozen=True, slots=True)
class TimedAction:
    """One action of the cluster scheduler; time_s is negative before the first request."""

    time_s: float
    what: str
    why: str


def write_page(out: Path, results_json: Path, journal: Path, report: Path) -> list[TimedAction]:
    """Writes `out` and returns the steps on it. `report` is the replay's own page, linked there.

    A cluster that keeps no journal leaves no steps. Raises ConfigError if a file is not what it
    should be.
    """
    results = read_results(results_json)
    records = list(read(journal)) if journal.exists() else []
    steps = list(steps_of(records, results.config.started_unix_s))
    page = environment("lab.demo", "prism_replay").get_template("demo.html")
    out.write_text(
        page.render(
            summary=results.summary,
            models=list(attainments(results)),
            steps=steps,
            report=report.name,
        ),
        encoding="utf-8",
    )
    return steps


def steps_of(records: Sequence[AnyRecord], first_request_unix_s: float) -> Iterator[TimedAction]:
    """The actions in the journal of the cluster scheduler, in their order."""
    zero_s = 0.0
    for record in records:
        if isinstance(record, Opened):  # its clock, against the replay's
            zero_s = record.time_s + first_request_unix_s - record.unix_s
        elif isinstance(record, Started):
            yield TimedAction(record.time_s - zero_s, told(record), record.reason)


def told(action: Started) -> str:
    text = {
        "activate": "{0.model} is activated on {0.device}",
        "evict": "{0.model} is evicted from {0.device}",
        "migrate": "{0.model} migrates from {0.device} to {0.target}",
        "drop_copy": "{0.model}'s second copy leaves {0.device}",
    }
    return text[action.kind].format(action)


def attainments(results: ReplayResults) -> Iterator[tuple[str, int, str]]:
    """(model, requests, percentage of them that met their SLO)."""
    for name, group in results.summary.models.items():
        met = group.attainment[scale_key(1.0)].all
        yield name, group.requests, "-" if met is None else f"{met:.0%}"
