"""Simulation of a placement in its independent parts, for searches that try many placements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prism.policies.placement import Placement, PlacementOutcome, Unit
from prism.policies.planning import target
from prism.policies.policy import Policy
from prism_sim.core.setup import ClusterSetup

Part = tuple[Unit, ...]


class PartwiseSimulation:
    """`Problem.simulate` that simulates each part of a placement separately, and only once.

    Units that share neither models nor processors do not affect each other. The placements of a
    search differ in few of these parts. Results are the same as of the whole placement.

    Args:
        simulate: Simulates a placement. The requests of models that it leaves out are unserved.
    """

    def __init__(
        self,
        setup: ClusterSetup,
        policy: Policy,
        simulate: Callable[[Placement], PlacementOutcome],
    ) -> None:
        self._simulate = simulate
        self._is_divisible = policy.plan is target.plan and not _shares_host_memory(setup)
        self._processors = {d.name: d.processor or d.name for d in setup.devices}
        self._known: dict[Part, PlacementOutcome] = {}

    def __call__(self, placement: Placement) -> PlacementOutcome:
        nothing = self._outcome(())
        unserved, latency = dict(nothing.unserved), dict(nothing.normalized_latency)
        for part in self._parts(placement):
            found = self._outcome(part)
            for model in {hosted.model for unit in part for hosted in unit.models}:
                unserved[model] = found.unserved[model]
                latency[model] = found.normalized_latency[model]
        return PlacementOutcome(nothing.requests, unserved, latency)

    def _outcome(self, part: Part) -> PlacementOutcome:
        if part not in self._known:
            self._known[part] = self._simulate(Placement(part))
        return self._known[part]

    def _parts(self, placement: Placement) -> list[Part]:
        used = [unit for unit in placement.units if unit.models]
        if not self._is_divisible:
            return [tuple(used)]
        return connected(used, [self._resources(unit) for unit in used])

    def _resources(self, unit: Unit) -> set[tuple[str, str]]:
        models = {("model", hosted.model) for hosted in unit.models}
        return models | {("processor", self._processors[device]) for device in unit.devices}


def _shares_host_memory(setup: ClusterSetup) -> bool:
    """Returns whether activations on different devices affect each other."""
    return setup.activation.host_store_bytes is not None


def connected(units: Sequence[Unit], resources: Sequence[Iterable[tuple[str, str]]]) -> list[Part]:
    """Divides units into parts without a common resource. Each keeps the order of its units."""
    parts: list[tuple[set[tuple[str, str]], list[int]]] = []
    for number, own in enumerate(resources):
        joined, numbers = set(own), [number]
        apart = []
        for held, others in parts:
            if held.isdisjoint(joined):
                apart.append((held, others))
            else:
                joined |= held
                numbers += others
        parts = [*apart, (joined, numbers)]
    return [tuple(units[n] for n in sorted(numbers)) for _, numbers in parts]
