"""What a comparison is made of: from files, or from a live run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from prism.config_load import load
from prism.parity.compare import Inputs
from prism.parity.journals import read_journals
from prism.parity.live import Wanted, record
from prism.replay.results import read_results


@dataclass(frozen=True, slots=True)
class Files:
    """journals: folders; the first is of the replay, the others of the same cluster before."""

    results: Path
    journals: Sequence[Path]
    costs: Path


def from_files(config: Path, files: Files, scales: Sequence[float]) -> Inputs:
    """Raises ConfigError."""
    resolved = load(config)
    journal, *earlier = (read_journals(folder, resolved) for folder in files.journals)
    results = read_results(files.results)
    return Inputs(resolved, results, journal, files.costs, scales, tuple(earlier))


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
