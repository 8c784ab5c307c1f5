"""The one-page HTML report of a simulation: prism-replay's page with GPUs and decisions."""

from __future__ import annotations

from pathlib import Path

from prism.replay.report import environment, sections
from prism.replay.results import Results
from prism.sim.results import SimResults

DECISIONS_SHOWN = 200


def write_report(path: Path, found: SimResults, replay: Results) -> None:
    path.write_text(render(found, replay), encoding="utf-8")


def render(found: SimResults, replay: Results) -> str:
    """The page's HTML, everything inline. `replay`: the same run in prism-replay's form."""
    page = environment("prism.sim", "prism.replay").get_template("simulation.html")
    shown = sections(replay)
    # simulated engines count no page maps
    shown["plots"].pop("maps", None)
    return page.render(**shown, sim=found, decisions=found.decisions[:DECISIONS_SHOWN])
