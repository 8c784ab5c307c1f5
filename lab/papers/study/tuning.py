"""Tuning of the systems that a study compares, with the same budget for each and a log.

Each system has a list of at most TRIES settings of its knobs, starting with the shipped ones. All
are tried on traces that are not evaluated, at one load, by the study's main measure. The best
setting is used at every point of the studies that share the setup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from lab.papers.study.lab import Lab
from lab.papers.study.lines import Points
from lab.papers.study.sources import Sources
from lab.papers.study.trial import Trial, TrialOutcome

TRIES = 4
QUICK_TRIES = 2
Settings = Mapping[str, Any]
Systems = Mapping[str, tuple[str, str]]
"""Name -> (policy, variant)."""

OPTIONS: dict[str, tuple[Settings, ...]] = {
    name: tuple(tries)
    for name, tries in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}
"""Policy, or policy and variant -> settings to try."""


@dataclass(frozen=True)
class Tuned:
    best: Mapping[str, Settings] = field(default_factory=dict)
    """System -> its best settings."""
    log: tuple[str, ...] = ()
    """Texts on all tries, for the report."""

    def of(self, system: str) -> Settings:
        return self.best.get(system, {})


AS_SHIPPED = Tuned()
NO_CHANGES: Settings = {}
RULE = (
    f"Every system is tuned with the same budget: at most {TRIES} settings of its knobs, starting "
    "with the shipped ones, on generated traces of the same kind that are not evaluated, at one "
    "load. The best one (the first of equal ones) is used at every point of all seeds. "
    "Systems with fewer knobs have fewer settings."
)
ONE_POLICY = "Parts of one policy are compared, which runs with the shipped settings."


def simulated(
    lab: Lab,
    setups: Mapping[Any, str],
    systems: Systems,
    tuned: Tuned = AS_SHIPPED,
    changes: Settings = NO_CHANGES,
    *,
    key: str = "",
) -> Points:
    """Runs each system with its tuned settings and the changes.

    Args:
        setups: x -> path of the YAML.
        key: Key that is set to x; "" for none.
    """
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


def tuning_lab(lab: Lab, number: int = 0) -> Lab:
    """Returns a lab for traces to tune on, with another seed and generators only.

    With the user's files, another seed would draw other models of the same minutes.
    """
    return replace(lab, seed=lab.tuning_seed + number, sources=Sources())


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
    """Tries the options of each system and returns the best ones.

    Args:
        configs: Setups to tune on.
        measure: Larger is better; None for a point that was not simulated.
        load: Description of `configs`.
        what: Description of `measure`.
        fixed: Changes of the setups.
    """
    maximum = lab.pick(TRIES, QUICK_TRIES)
    tries = {name: options(*system)[:maximum] for name, system in systems.items()}
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
    log = (f"{name}: {_described(tries[name], figures[name], best[name])}" for name in systems)
    settings_of = {name: tries[name][place] for name, place in best.items()}
    return Tuned(settings_of, (f"Tuned on {load}, by {what}. " + "; ".join(log),))


def best_of(figures: Sequence[float | None]) -> int:
    """Returns the index of the largest figure, the first of equal ones; 0 without figures."""
    known = [(figure, -place) for place, figure in enumerate(figures) if figure is not None]
    return -max(known)[1] if known else 0


def whole_mean(figures: Sequence[float | None]) -> float | None:
    """Returns the mean; None if a figure is missing."""
    known = [figure for figure in figures if figure is not None]
    return sum(known) / len(known) if len(known) == len(figures) else None


def _described(tries: Sequence[Settings], figures: Sequence[float | None], best: int) -> str:
    texts = []
    for place, (settings, figure) in enumerate(zip(tries, figures, strict=True)):
        named = " and ".join(f"{key.rpartition('.')[2]} {v}" for key, v in settings.items())
        shown = "not simulated" if figure is None else f"{figure:.4g}"
        taken = " (taken)" if place == best else ""
        texts.append(f"{named or 'as shipped'} {shown}{taken}")
    return ", ".join(texts)
