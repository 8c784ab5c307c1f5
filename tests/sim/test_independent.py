"""Placements simulated in their independent parts: the same outcomes as of the whole placement."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.policies import registry
from prism.policies.placement import Hosted, Placement, PlacementOutcome, Unit
from prism_sim.cluster.world import World
from prism_sim.core.profile import loads
from prism_sim.core.setup import ClusterSetup
from prism_sim.core.workload import Workload
from prism_sim.placement.independent import PartwiseSimulation
from prism_sim.placement.search import outcome
from tests.sim.clusters import MIB, cluster, model, request, work

NAMES = "abcdef"
MODELS = [model(index, name, request_s=0.01) for index, name in enumerate(NAMES)]


class Simulation:
    """Simulation of whole placements. `asked` has the placements."""

    def __init__(self, setup: ClusterSetup, trace: Workload) -> None:
        self._setup = setup
        self._trace = trace
        self._loads = loads(setup, trace)
        self.asked: list[Placement] = []

    def __call__(self, placement: Placement) -> PlacementOutcome:
        self.asked.append(placement)
        return outcome(World(self._setup, self._trace, None, placement).run(), self._loads)

    def in_parts(self) -> PartwiseSimulation:
        return PartwiseSimulation(self._setup, registry.get(self._setup.policy), self)


def placed(*units: tuple[int, str]) -> Placement:
    """Makes a placement of units, each the number of its first device and its models. If these are
    in upper case, the unit has the next device too."""
    found = []
    for first, models in units:
        devices = (first, first + 1) if models.isupper() else (first,)
        names = tuple(Hosted(name) for name in models.lower())
        found.append(Unit(tuple(f"gpu:{number}" for number in devices), names))
    return Placement(tuple(found))


def trace_of(setup: ClusterSetup, requests: Sequence[tuple[float, str, int, int]]) -> Workload:
    found = work(setup, [request(*each) for each in requests])
    for index in range(len(found)):
        found.slo_e2e_s[index] = 1.5
    return found


HOSTED = st.lists(st.sampled_from(NAMES), unique=True, max_size=3).map("".join)
REQUESTS = st.lists(
    st.tuples(st.floats(0, 20), st.sampled_from(NAMES), st.integers(1, 900), st.integers(1, 90)),
    min_size=1,
    max_size=80,
)


@pytest.mark.parametrize("policy", ["alpaserve", "seallm"])
@settings(max_examples=40, deadline=None)
@given(st.tuples(HOSTED, HOSTED, HOSTED, HOSTED), st.booleans(), REQUESTS)
def test_the_outcome_is_that_of_the_whole_placement(
    policy: str,
    hosted: tuple[str, str, str, str],
    wide: bool,
    requests: list[tuple[float, str, int, int]],
) -> None:
    setup = cluster(MODELS, 4, policy=policy)
    units = [*enumerate(hosted[:2]), (2, hosted[2].upper())] if wide else [*enumerate(hosted)]
    placement = placed(*units)
    whole = Simulation(setup, trace_of(setup, requests))
    assert whole.in_parts()(placement) == whole(placement)


def test_only_the_changed_part_is_simulated_again() -> None:
    setup = cluster(MODELS, 4, policy="seallm")
    requests = [(0.1 * number, NAMES[number % 6], 200, 20) for number in range(60)]
    simulation = Simulation(setup, trace_of(setup, requests))
    simulate = simulation.in_parts()
    simulate(placed((0, "ab"), (1, "c"), (2, "d")))
    nothing, *parts = [placement.units for placement in simulation.asked]
    assert nothing == ()
    assert set(parts) == {placed((0, "ab")).units, placed((1, "c")).units, placed((2, "d")).units}
    simulation.asked.clear()
    simulate(placed((0, "ab"), (1, "c"), (2, "de")))
    assert simulation.asked == [placed((2, "de"))]
    simulation.asked.clear()
    simulate(placed((0, "abd"), (1, "c"), (2, "de")))  # a copy of d makes one part of two units
    assert simulation.asked == [placed((0, "abd"), (2, "de"))]


def test_devices_of_one_processor_are_one_part() -> None:
    setup = cluster(MODELS, 2, policy="seallm")
    shared = [dataclasses.replace(device, processor="host") for device in setup.devices]
    setup = dataclasses.replace(setup, devices=tuple(shared))
    simulation = Simulation(setup, trace_of(setup, [(0.0, "a", 100, 10), (0.0, "b", 100, 10)]))
    simulation.in_parts()(placed((0, "a"), (1, "b")))
    assert simulation.asked == [placed(), placed((0, "a"), (1, "b"))]


def test_a_shared_host_memory_makes_one_part() -> None:
    setup = cluster(MODELS, 2, policy="seallm")
    limited = dataclasses.replace(setup.activation, host_store_bytes=20 * MIB)
    setup = dataclasses.replace(setup, activation=limited)
    simulation = Simulation(setup, trace_of(setup, [(0.0, "a", 100, 10), (0.0, "b", 100, 10)]))
    simulation.in_parts()(placed((0, "a"), (1, "b")))
    assert simulation.asked == [placed(), placed((0, "a"), (1, "b"))]
