"""The whole comparison, from the live system's files to `ParityResults`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from lab.parity import admission
from lab.parity.causes import Causes, Moments
from lab.parity.checks import check_all
from lab.parity.journals import Journals
from lab.parity.latency import figures, samples, simulated_records
from lab.parity.parity_results import ParityResults
from lab.parity.placement import compare_placement
from lab.parity.runs import History, live_run, simulated_run
from lab.parity.setup import (
    cost_tables,
    initial,
    measured,
    parity_setup,
    replayed,
)
from prism.config.policy_knobs import live_policy
from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import ConfigError
from prism.policies.placement import Placement
from prism.scheduler.decision_journal import Planned
from prism_replay.results import ReplayResults, RequestRecord
from prism_sim.cluster.world import World
from prism_sim.core.profile import loads
from prism_sim.core.workload import Workload
from prism_sim.live.live_setup import cores_of


@dataclass(frozen=True, slots=True)
class Inputs:
    config: ClusterConfig
    results: ReplayResults
    journals: Journals
    costs: Path
    scales: Sequence[float] = (0.5, 1.0, 2.0)
    earlier: tuple[Journals, ...] = ()
    """Journals of the same cluster at other times, for more measured activations."""
    cores: float | None = None
    """Number of cores for the engines of host devices; None for all cores of this process."""


@dataclass(frozen=True, slots=True)
class ParityOutcome:
    """Results of a comparison, and both worlds' decisions for the report."""

    results: ParityResults
    live: History
    simulated: History
    world: World = field(repr=False)


def compare(given: Inputs) -> ParityOutcome:
    """Runs the simulation and compares. Raises ConfigError if the files do not match."""
    records = _checked(given.results)
    start_s = given.results.config.started_unix_s
    tables = cost_tables(given.costs, sorted({record.model for record in records}))
    cores = given.cores or cores_of(given.config)
    restarts = live_policy(given.config).restarts_engine
    found = measured((*given.earlier, given.journals), restarts=restarts)
    found, lead_s = initial(given.journals, start_s, found)
    setup = parity_setup(given.config, found, tables, cores)
    live = live_run(given.journals, given.results)
    work = replayed(given.results, setup, lead_s)
    world = World(setup, work, target=_searched(given.journals), keep_queues=True)
    world.run()
    simulated = simulated_run(world, lead_s)
    ours = simulated_records(world.records, records)
    causes = _causes(given, live, world)
    results = ParityResults(
        trace=given.results.config.trace,
        policy=given.config.policy,
        requests=len(records),
        failed_live=sum(not record.ok for record in records),
        failed_simulated=len(world.records.errors),
        lead_s=lead_s,
        cores=cores if isfinite(cores) else None,
        costs={name: table.source for name, table in sorted(tables.items())},
        checks=check_all(given.journals, world.policy),
        compared={
            "placement": compare_placement(live, simulated),
            "device of a request": admission.compare_devices(live, simulated),
            "admission order": admission.compare_order(live, simulated, causes),
            "turns": admission.compare_positions(live, simulated, causes),
            "pairs that waited together": admission.compare_pairs(live, simulated, causes),
        },
        figures=figures(records, ours, given.scales, _execution_s(world, work)),
        samples=samples(records, ours),
    )
    return ParityOutcome(results, live, simulated, world)


def _searched(journals: Journals) -> Placement | None:
    """Returns the first placement that the live system has searched. It knew other rates than the
    simulator, which knows the whole trace."""
    views = (d.record.view for d in journals.cluster if isinstance(d.record, Planned))
    return next((view.target for view in views), None)


def _causes(given: Inputs, live: History, world: World) -> Causes:
    agents = given.journals.agents
    ours = {device: [dated.record for dated in found] for device, found in agents.items()}
    theirs = {device: memory.records for device, memory in world.queues.items()}
    limits = world.setup.limits
    return Causes(world.policy, limits, Moments(ours), Moments(theirs), live)


def _checked(results: ReplayResults) -> list[RequestRecord]:
    if results.config.interrupted:
        raise ConfigError("--results: the replay was interrupted; give a complete one")
    if not results.records:
        raise ConfigError("--results: does not have a request; give the replay of a trace")
    return results.records


def _execution_s(world: World, work: Workload) -> Mapping[str, float]:
    found = loads(world.setup, work)
    return {
        model.name: load.execution_s for model, load in zip(world.setup.models, found, strict=True)
    }
