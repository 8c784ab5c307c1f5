"""The HTML page of a run."""

from __future__ import annotations

from pathlib import Path

from prism_replay.report.page import environment, sections
from prism_replay.results import ReplayResults
from prism_sim.output.results import SimResults

DECISIONS_SHOWN = 200


def write_report(path: Path, found: SimResults, replay: ReplayResults) -> None:
    """One run's page, everything inline. `replay`: the same run in prism-replay's form."""
    page = environment("prism_sim", "prism_replay").get_template("simulation.html")
    shown = sections(replay)
    # simulated engines count no page maps
    shown["plots"].pop("maps", None)
    decisions = found.decisions[:DECISIONS_SHOWN]
    path.write_text(page.render(**shown, sim=found, decisions=decisions), encoding="utf-8")
