"""Tuning: the same small budget for every system that a study compares, and a log of every try.

Each system has a list of at most TRIES settings of knobs that are its own, the shipped ones first.
All are tried on traces that no study evaluates, at one load, by the study's main measure; the best
one is used at every point of the studies that share the trace's setup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from lab.papers.lab import Lab
from lab.papers.lines import Points
from lab.papers.sources import Sources
from lab.papers.trial import Trial, TrialOutcome

TRIES = 4
QUICK_TRIES = 2
SEED = 1000
"""On top of the run's seed, for traces to tune on."""
Settings = Mapping[str, Any]
Systems = Mapping[str, tuple[str, str]]
"""name -> (policy, variant)"""

OPTIONS: dict[str, tuple[Settings, ...]] = {
    name: tuple(tries)
    for name, tries in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}
"""Policy, or policy and variant -> what is tried."""


@dataclass(frozen=True)
class Tuned:
    taken: Mapping[str, Settings] = field(default_factory=dict)
    """System -> the settings that did best."""
    said: tuple[str, ...] = ()
    """Every try, for the report."""

    def of(self, system: str) -> Settings:
        return self.taken.get(system, {})


AS_SHIPPED = Tuned()
NO_CHANGES: Settings = {}
RULE = (
    f"Every system is tuned with the same budget: at most {TRIES} settings of knobs that are its "
    "own, the shipped ones first, on generated traces of the same kind that are not evaluated, at "
    "one load; the best one, of equals the first, is used at every point. Systems with fewer knobs "
    "had fewer settings to try"
)


def simulated(
    lab: Lab,
    setups: Mapping[Any, str],
    systems: Systems,
    tuned: Tuned = AS_SHIPPED,
    changes: Settings = NO_CHANGES,
    *,
    key: str = "",
) -> Points:
    """Each system with the settings it was tuned to, and the changes. setups: x -> YAML. key: takes
    x as its value."""
    trials = [
        Trial(
            config,
            {**tuned.of(name), **changes, **({key: x} if key else {}), "policy": policy},
            variant=variant,
        )
        for x, config in setups.items()
        for name, (policy, variant) in systems.items()
    ]
    outcomes = iter(lab.run(trials))
    return {x: {name: next(outcomes) for name in systems} for x in setups}


def elsewhere(lab: Lab, number: int = 0) -> Lab:
    """Where traces to tune on are made: by generators, also where studies replay files, of which
    another seed draws other models of the same minutes."""
    return replace(lab, seed=lab.seed + SEED + number, sources=Sources())


def options(policy: str, variant: str) -> tuple[Settings, ...]:
    return OPTIONS.get(f"{policy} {variant}") or OPTIONS[policy]


def tune(
    lab: Lab,
    configs: Sequence[str],
    systems: Systems,
    measure: Callable[[TrialOutcome], float | None],
    *,
    load: str,
    what: str,
    fixed: Settings | None = None,
) -> Tuned:
    """configs: the setups to tune on, with the changes `fixed`. measure: larger is better; None
    where a point could not be simulated. load, what: `configs` and `measure` in words."""
    most = lab.pick(TRIES, QUICK_TRIES)
    tries = {name: options(*system)[:most] for name, system in systems.items()}
    trials = [
        Trial(config, {**(fixed or {}), **settings, "policy": policy}, variant=variant)
        for name, (policy, variant) in systems.items()
        for settings in tries[name]
        for config in configs
    ]
    flat = iter([measure(outcome) for outcome in lab.run(trials, "tuning")])
    figures = {
        name: [whole_mean([next(flat) for _ in configs]) for _ in each]
        for name, each in tries.items()
    }
    best = {name: best_of(each) for name, each in figures.items()}
    log = (f"{name}: {_said(tries[name], figures[name], best[name])}" for name in systems)
    taken = {name: tries[name][place] for name, place in best.items()}
    return Tuned(taken, (f"Tuned on {load}, by {what}. " + "; ".join(log),))


def best_of(figures: Sequence[float | None]) -> int:
    """The place of the largest; of equal ones, and where there is none, the first."""
    known = [(figure, -place) for place, figure in enumerate(figures) if figure is not None]
    return -max(known)[1] if known else 0


def whole_mean(figures: Sequence[float | None]) -> float | None:
    """None where any is missing."""
    known = [figure for figure in figures if figure is not None]
    return sum(known) / len(known) if len(known) == len(figures) else None


def _said(tries: Sequence[Settings], figures: Sequence[float | None], best: int) -> str:
    parts = []
    for place, (settings, figure) in enumerate(zip(tries, figures, strict=True)):
        named = " and ".join(f"{key.rpartition('.')[2]} {v}" for key, v in settings.items())
        shown = "not simulated" if figure is None else f"{figure:.4g}"
        taken = " (taken)" if place == best else ""
        parts.append(f"{named or 'as shipped'} {shown}{taken}")
    return ", ".join(parts)
