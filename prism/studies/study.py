"""What a study is: a description and a function of a Lab."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prism.studies.findings import Findings
from prism.studies.lab import Lab


@dataclass(frozen=True)
class Study:
    """source: section and figure of the paper. setup: what is simulated, in words. shortened: what
    is smaller than in the paper. differs: why our figures may differ, in words; shown whatever
    comes out."""

    name: str
    title: str
    source: str
    setup: str
    shortened: str
    differs: str
    run: Callable[[Lab], Findings]
