"""HTML report of a run."""

from __future__ import annotations

from pathlib import Path

from prism_replay.report.page import environment, sections
from prism_replay.results import ReplayResults
from prism_sim.output.results import SimResults

DECISIONS_SHOWN = 200


def write_report(path: Path, found: SimResults, replay: ReplayResults) -> None:
    """Writes the page of one run, with all resources inline. replay: The run in prism-replay's
    format."""
    page = environment("prism_sim", "prism_replay").get_template("simulation.html")
    decisions = found.decisions[:DECISIONS_SHOWN]
    path.write_text(
        page.render(**sections(replay), sim=found, decisions=decisions), encoding="utf-8"
    )
