"""Results of one run, as in results.json. They do not depend on the machine or on the wall clock.

`tables.py` has the tables of a run.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from prism_replay.results import (
    CHANGES,
    Counters,
    DeviceMemory,
    PlacementChange,
    ReplayResults,
    RunConfig,
    StatusSample,
    Summary,
)
from prism_sim.cluster.world import World
from prism_sim.core.profile import loads
from prism_sim.core.records import ClusterSample, Decision, Records
from prism_sim.output.summary import prefix_hits, request_records, summarize
from prism_sim.scenario.config import SimYaml

SCHEMA = "prism-sim/1"
PLOTTED_REQUESTS = 50_000


class GpuUse(msgspec.Struct, frozen=True):
    """Use of one GPU in the run."""

    name: str
    node: str
    capacity_bytes: int
    # Maximum of the reserved memory.
    peak_bytes: int
    # The part of the time in which an engine computed.
    busy: float


class SimResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run."""

    config: SimYaml
    summary: Summary
    # Number of decisions of each kind, of retractions and other events.
    counts: dict[str, int]
    gpus: list[GpuUse]
    decisions: list[Decision]
    samples: list[ClusterSample]
    # Number of kernel events, to measure speed.
    events: int
    # Model, and "total" -> part of its prompt tokens that were cached. Set by
    # `engine.prefix_reuse`.
    prefix_hits: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    schema: str = SCHEMA


def results_of(config: SimYaml, world: World, scales: Sequence[float]) -> SimResults:
    """Returns the results of a simulation. REQUIRES: `world` has run."""
    records = world.records
    seconds = max(records.end_time_s, 1e-9)
    return SimResults(
        config=config,
        summary=summarize(records, scales, loads(world.setup, records.work)),
        counts=dict(sorted(records.counts.items())),
        gpus=[
            GpuUse(
                d.name,
                d.setup.node,
                d.setup.capacity_bytes,
                d.ledger.peak_bytes,
                d.gpu.busy_by(records.end_time_s) / seconds,
            )
            for d in world.devices
        ],
        decisions=records.decisions,
        samples=records.samples,
        events=records.events,
        prefix_hits=prefix_hits(records) if config.engine.prefix_reuse else msgspec.UNSET,
    )


def as_replay(results: SimResults, records: Records, scales: Sequence[float]) -> ReplayResults:
    """Returns the run in prism-replay's format, for its tables and plots. Has a sample of the
    requests if there are many."""
    config = results.config
    counts = results.counts
    counters = Counters(
        retractions=counts.get("retractions", 0),
        activations=counts.get("active", 0),
        evictions=counts.get("evict", 0),
        migrations=counts.get("migrated", 0),
    )
    capacity_bytes = sum(gpu.capacity_bytes for gpu in results.gpus)
    capacities = {gpu.name: gpu.capacity_bytes for gpu in results.gpus}
    names = records.work.models
    samples = [
        StatusSample(
            sample.time_s,
            {names[model]: size for model, size in sample.kv_bytes.items()},
            sample.reserved_bytes,
            capacity_bytes,
            Counters(),
            {
                name: DeviceMemory(
                    capacities[name],
                    {names[each.model]: each.weights_bytes for each in models},
                    {names[each.model]: each.kv_bytes for each in models},
                )
                for name, models in sample.devices.items()
            },
        )
        for sample in results.samples
    ]
    changes = [
        PlacementChange(d.time_s, d.kind, d.model, d.device, d.target, d.reason)
        for d in results.decisions
        if d.kind in CHANGES
    ]
    run = RunConfig(
        trace=config.trace or "generated",
        url=f"a simulated cluster of {len(results.gpus)} GPUs",
        requests=len(records.work),
        rate_scale=config.rate_scale,
        slo_scales=tuple(scales),
        seed=config.seed,
    )
    shown = request_records(records, PLOTTED_REQUESTS)
    return ReplayResults(run, shown, samples, counters, results.summary, changes)
