"""Where a study works: its folder, its size, and how its points are simulated."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lab.papers.sources import Sources
from lab.papers.trial import Trial, TrialOutcome, simulate
from prism.errors import ConfigError
from prism_replay.trace import Trace, write_trace
from prism_sim.sweeps.points import Store, run_points

T = TypeVar("T")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Lab:
    """Setups and traces are written into the folder, so that `prism-sim run` can open every point.
    Outcomes are kept beside it: a study that was cut off goes on where it stopped, and no study
    simulates what another has."""

    folder: Path
    """Of one study, beside those of others."""
    bar: Callable[[str], AbstractContextManager[Progress]]
    """Shows progress under a name."""
    quick: bool = False
    """The size for tests."""
    jobs: int = 1
    seed: int = 0
    sources: Sources = field(default_factory=Sources)
    written: dict[Path, str] = field(default_factory=dict)
    """Digests of the setups and traces of this run, by file."""

    def pick(self, full: T, quick: T) -> T:
        return quick if self.quick else full

    def setup(self, name: str, config: Mapping[str, Any], trace: Trace) -> str:
        """Write a YAML of `prism-sim` and its trace; returns the YAML's path. Raises ConfigError if
        this run has written another under that name, whose points no longer could be opened."""
        path = self._setups() / f"{name}.jsonl"
        partial = path.with_suffix(".new")
        write_trace(partial, trace)
        self._claim(path, partial)
        return self.write(name, {**config, "trace": f"{name}.jsonl"})

    def write(self, name: str, config: Mapping[str, Any]) -> str:
        """Write a YAML of `prism-sim` alone; returns its path. Raises ConfigError as `setup`. Each
        model gets one place from Prism, as in the papers."""
        path = self._setups() / f"{name}.yaml"
        partial = path.with_suffix(".new")
        alone = {"models": [{**m, "replicas": {"max": 1}} for m in config.get("models", ())]}
        partial.write_text(yaml.safe_dump({**config, **alone}, sort_keys=False))
        self._claim(path, partial)
        return str(path)

    def _claim(self, path: Path, partial: Path) -> None:
        """Rename `partial` to `path`, unless this run has written something else there."""
        digest = hashlib.sha256(partial.read_bytes()).hexdigest()
        if self.written.setdefault(path, digest) != digest:
            partial.unlink()
            raise ConfigError(f"{path.name} is another setup of this study: give it its own name")
        partial.rename(path)

    def _setups(self) -> Path:
        folder = self.folder / "setups"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def read(self, config: str) -> dict[str, Any]:
        """A setup that was written, without its trace."""
        data: dict[str, Any] = yaml.safe_load(Path(config).read_text())
        del data["trace"]
        return data

    def run(self, trials: Sequence[Trial], what: str = "simulating") -> list[TrialOutcome]:
        """Outcomes in the order of `trials`."""
        store = Store(self.folder.parent / "points", TrialOutcome)
        with self.bar(what) as progress:
            return run_points(trials, simulate, jobs=self.jobs, store=store, progress=progress)
