"""What a comparison is made of: from files, or from a live run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from prism.config_load import load
from prism.parity.compare import Inputs
from prism.parity.journals import read_journals
from prism.parity.live import Wanted, record
from prism.replay.results import read_results


def from_files(config: Path, files: Sequence[Path], scales: Sequence[float]) -> Inputs:
    """files: results, journal, costs. Raises ConfigError."""
    results, journal, costs = files
    resolved = load(config)
    return Inputs(resolved, read_results(results), read_journals(journal, resolved), costs, scales)


def from_live(wanted: Wanted, console: Console) -> Inputs:
    """Raises ConfigError, ServeFailedError."""
    found = record(wanted, console)
    return Inputs(
        found.config,
        found.results,
        found.journals,
        found.costs,
        wanted.scales,
        earlier=(found.earlier,),
    )
