"""Environment of a study: its folder, its size, and the simulation of its points."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lab.papers.study.sources import Sources
from lab.papers.study.trial import Trial, TrialOutcome, simulate
from prism.errors import ConfigError
from prism_replay.trace import Trace, write_trace
from prism_sim.sweeps.points import Store, run_points

T = TypeVar("T")
Progress = Callable[[int, int], None]
Bars = Callable[[str], AbstractContextManager[Progress]]
"""Function from a name to a context that shows progress."""


@dataclass(frozen=True)
class Lab:
    """Environment of a study with one seed.

    Setups and traces are written to the study's folder, so that `prism-sim run` can open every
    point. Outcomes are stored in the parent folder. An interrupted study resumes from them, and all
    studies share them.
    """

    folder: Path
    """Folder of the study."""
    bar: Bars
    quick: bool = False
    """True for the size for tests."""
    jobs: int = 1
    """Number of processes."""
    seed: int = 0
    tuning_seed: int = 1000
    """Seed of the first trace to tune on. Runs with several seeds share it and so their tuning."""
    sources: Sources = field(default_factory=Sources)
    written: dict[Path, str] = field(default_factory=dict)
    """File of a setup or trace of this run -> its digest."""

    def pick(self, full: T, quick: T) -> T:
        return quick if self.quick else full

    def setup(self, name: str, config: Mapping[str, Any], trace: Trace) -> str:
        """Writes a YAML of `prism-sim` and its trace. Returns the YAML's path.

        Raises ConfigError if this run has written a different one under that name, since the points
        of the first one could not be opened any more.
        """
        path = self._setups() / f"{name}.jsonl"
        partial = path.with_suffix(".new")
        write_trace(partial, trace)
        self._claim(path, partial)
        return self.write(name, {**config, "trace": f"{name}.jsonl"})

    def write(self, name: str, config: Mapping[str, Any]) -> str:
        """Writes a YAML of `prism-sim` without a trace. Returns its path.

        Each model has at most one replica, as in the papers. Raises ConfigError like `setup`.
        """
        path = self._setups() / f"{name}.yaml"
        partial = path.with_suffix(".new")
        single = {"models": [{**m, "replicas": {"max": 1}} for m in config.get("models", ())]}
        partial.write_text(yaml.safe_dump({**config, **single}, sort_keys=False))
        self._claim(path, partial)
        return str(path)

    def _claim(self, path: Path, partial: Path) -> None:
        """Renames `partial` to `path`. Raises ConfigError if this run wrote other content there."""
        digest = hashlib.sha256(partial.read_bytes()).hexdigest()
        if self.written.setdefault(path, digest) != digest:
            partial.unlink()
            raise ConfigError(f"{path.name}: this study has a different setup of that name")
        partial.rename(path)

    def _setups(self) -> Path:
        folder = self.folder / "setups" / f"seed-{self.seed}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def read(self, config: str) -> dict[str, Any]:
        """Returns a written setup without its trace."""
        data: dict[str, Any] = yaml.safe_load(Path(config).read_text())
        del data["trace"]
        return data

    def run(self, trials: Sequence[Trial], what: str = "simulating") -> list[TrialOutcome]:
        """Returns the outcomes in the order of `trials`."""
        store = Store(self.folder.parent / "points", TrialOutcome)
        with self.bar(what) as progress:
            return run_points(trials, simulate, jobs=self.jobs, store=store, progress=progress)
