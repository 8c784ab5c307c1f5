"""Simulation setup of a live configuration.

It has the same devices, capacities, pages, engines, policy and limits, each model's memory as its
engine reserved it, and the times measured on the live cluster.
"""

from __future__ import annotations

import statistics
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

from lab.parity.journals import Dated, Journals
from prism.config.checks.memory_needs import BLOCK_TOKENS, layout_of, memory_need
from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import ConfigError
from prism.messages.model_spec import ModelSpec
from prism.models.prefill_speed import PRIOR_TOKENS_PER_S
from prism.scheduler.decision_journal import Ended, Queued, Served, Started
from prism_replay.results import ReplayResults, RequestRecord
from prism_sim.core.setup import (
    ActivationSettings,
    ClusterSetup,
    DegreeSetup,
    ModelSetup,
)
from prism_sim.core.workload import Workload, slo_s
from prism_sim.costs.grid import read_grid
from prism_sim.costs.model import CostModel
from prism_sim.costs.shapes import short_name
from prism_sim.costs.table import StepTable, TableCost
from prism_sim.live.live_setup import (
    HostCost,
    cluster_setup,
    device_setup,
    is_on_host,
    kv_shape,
    model_setup,
)


@dataclass(frozen=True, slots=True)
class LiveMeasurements:
    """Measurements of a live cluster, from its journals."""

    served: Mapping[str, Served] = field(default_factory=dict)
    """Model -> the last report of its engine."""
    activation_s: Mapping[str, float] = field(default_factory=dict)
    """Model -> median activation time, the lower of two: the first activation reads files."""
    unload_s: float = 0.0
    """Median time of an eviction."""
    reach_s: float = 0.0
    """Median time from a request's arrival at the frontend to its device's queue."""
    first_activation_s: Mapping[str, float] = field(default_factory=dict)
    """Model -> time of its activation before the replay, in the initial placement."""


def measured(journals: Iterable[Journals], *, restarts: bool = False) -> LiveMeasurements:
    """Returns the measurements. restarts: Activations include the start of an engine."""
    served: dict[str, Served] = {}
    seconds: dict[str, list[float]] = defaultdict(list)
    unloads_s: list[float] = []
    reach_s: list[float] = []
    for found in journals:
        unloads_s += _evictions_s(found.cluster)
        if restarts:
            for model, taken_s in _activations_s(found.cluster):
                seconds[model].append(taken_s)
        for _, (_, _, record) in found.all_agents():
            if isinstance(record, Served):
                served[record.model] = record
                if not restarts:
                    seconds[record.model].append(record.seconds)
            elif isinstance(record, Queued):
                reach_s.append(record.time_s - record.arrival_s)
    medians_s = {model: statistics.median_low(values) for model, values in seconds.items()}
    return LiveMeasurements(served, medians_s, _median(unloads_s), _median(reach_s))


def initial(
    journals: Journals, start_unix_s: float, found: LiveMeasurements
) -> tuple[LiveMeasurements, float]:
    """Returns `found` with the durations of the initial placement, and the replay's lead time.

    The lead time is from the start of the initial placement, at which the simulation starts, or
    without a placement from the scheduler's start, to the replay's start. Raises ConfigError.
    """
    before = [d for d in journals.cluster if d.unix_s <= start_unix_s]
    if not before:
        raise ConfigError("--journal: begins after the replay; give the journal of that cluster")
    began = [d.unix_s for d in before if isinstance(d.record, Started)]
    begin_s = began[0] if began else before[0].unix_s
    activated_s: dict[str, float] = {}
    for _, dated in journals.all_agents():
        if isinstance(dated.record, Served) and dated.unix_s <= start_unix_s:
            activated_s[dated.record.model] = dated.unix_s - begin_s
    return replace(found, first_activation_s=activated_s), start_unix_s - begin_s


def cost_tables(path: Path, models: Iterable[str]) -> dict[str, StepTable]:
    """Returns model -> its table in the file. Raises ConfigError."""
    if not path.exists():
        raise ConfigError(f"--costs: {path} is missing; `prism-sim calibrate engine` writes it")
    tables = {table.model: table for table in read_grid(path).tables if table.tp == 1}
    tables |= {short_name(name): table for name, table in tables.items()}
    found: dict[str, StepTable] = {}
    for model in models:
        table = tables.get(model) or tables.get(short_name(model))
        if table is None:
            raise ConfigError(
                f"--costs: {path} does not have a table of {model};"
                f" run `prism-sim calibrate engine --model {model}` on it"
            )
        found[model] = table
    return found


def parity_setup(
    config: ClusterConfig, found: LiveMeasurements, tables: Mapping[str, StepTable], cores: float
) -> ClusterSetup:
    """Returns the simulation's setup. Raises ConfigError.

    Models without a cost table have no requests; they get the slowest model's costs.
    """
    parallel = [model.name for model in config.models if model.possible_degrees != (1,)]
    if parallel:
        raise ConfigError(f"--config: {parallel[0]} may have tp > 1; parity supports only tp: 1")
    if config.scheduler.move_running:
        raise ConfigError("--config: parity supports only scheduler.migrate_running: finish")
    models = (
        _model(index, model, config, found, _cost(model.name, tables, config, cores))
        for index, model in enumerate(config.models)
    )
    return replace(
        cluster_setup(config, [device_setup(device) for device in config.devices], [*models]),
        activation=ActivationSettings(unload_s=found.unload_s),
        warm=False,
    )


def replayed(results: ReplayResults, setup: ClusterSetup, lead_s: float) -> Workload:
    """Returns the replayed requests, `lead_s` later, at the times when the client sent them.

    The client's lag is not part of the system. SLOs are those that the server got. Raises
    ConfigError for a model not in `setup`.
    """
    records, scale = results.records, results.config.sent_slo_scale
    number = {model.name: model.index for model in setup.models}
    unknown = sorted({record.model for record in records} - number.keys())
    if unknown:
        raise ConfigError(
            f"--results: {', '.join(unknown)} is not among the models of --config; give the"
            " configuration of the same cluster"
        )
    return Workload(
        models=tuple(model.name for model in setup.models),
        arrival_s=array("d", accumulate((_sent_s(r) + lead_s for r in records), max)),
        model=array("i", (number[record.model] for record in records)),
        prompt_tokens=array("i", (record.input_tokens for record in records)),
        output_tokens=array("i", (record.expected_tokens for record in records)),
        slo_ttft_s=array("d", (slo_s(record.slo_ttft_ms, scale) for record in records)),
        slo_tpot_s=array("d", (slo_s(record.slo_tpot_ms, scale) for record in records)),
        slo_e2e_s=array("d", (slo_s(record.slo_e2e_ms, scale) for record in records)),
        priority=array("i", (record.priority for record in records)),
    )


def _sent_s(record: RequestRecord) -> float:
    return record.arrival_s + max(0.0, record.send_lag_ms) / 1000


def _cost(
    name: str, tables: Mapping[str, StepTable], config: ClusterConfig, cores: float
) -> tuple[CostModel, float]:
    """Returns the model's step costs and the seconds of a request outside of steps."""
    table = tables.get(name) or max(tables.values(), key=lambda t: t.dense_s[-1])
    cost = HostCost(TableCost(table), cores) if is_on_host(config) else TableCost(table)
    return cost, table.request_s


def _model(
    index: int,
    spec: ModelSpec,
    config: ClusterConfig,
    found: LiveMeasurements,
    costs: tuple[CostModel, float],
) -> ModelSetup:
    cost, request_s = costs
    memory = found.served.get(spec.name) or _memory(spec, config)
    weight_bytes = min(spec.weight_bytes, memory.static_bytes)
    quantum_blocks = memory.quantum_tokens // BLOCK_TOKENS
    part = DegreeSetup(cost, quantum_blocks, memory.quantum_bytes, kv_shape(spec, 1))
    return replace(
        model_setup(index, spec, {1: part}, config),
        weight_bytes=weight_bytes,
        share_bytes=memory.static_bytes - weight_bytes,
        kv_floor_bytes=memory.reserve_bytes,
        activation_s=found.activation_s.get(spec.name),
        first_activation_s=found.first_activation_s.get(spec.name),
        request_s=min(found.reach_s, request_s),
        submit_s=max(0.0, request_s - found.reach_s),
        speed_tokens_per_s=PRIOR_TOKENS_PER_S,
    )


def _memory(spec: ModelSpec, config: ClusterConfig) -> Served:
    """Returns the start-up check's estimate of the memory of a model that was never activated."""
    device = max(
        (d for d in config.devices if spec.pinned_device in (None, d.name)),
        key=lambda d: d.capacity_bytes,
    )
    need, layout = memory_need(spec, device, config.engine), layout_of(spec)
    return Served(
        time_s=0.0,
        model=spec.name,
        seconds=0.0,
        static_bytes=need.weight_bytes + need.static_bytes,
        reserve_bytes=need.kv_bytes,
        quantum_bytes=layout.quantum_bytes(device.page_bytes),
        quantum_tokens=layout.slab_tokens(device.page_bytes),
        block_tokens=BLOCK_TOKENS,
    )


def _evictions_s(records: Iterable[Dated]) -> list[float]:
    started: dict[str, float] = {}
    found: list[float] = []
    for dated in records:
        record = dated.record
        if isinstance(record, Started) and record.kind == "evict":
            started[record.model] = dated.unix_s
        elif isinstance(record, Ended) and record.kind == "evict" and record.model in started:
            seconds = dated.unix_s - started.pop(record.model)
            found += [] if record.problem else [seconds]
    return found


def _activations_s(records: Iterable[Dated]) -> Iterator[tuple[str, float]]:
    """Yields (model, time of an activation after the evictions that it waited for)."""
    since_s: dict[str, float] = defaultdict(float)  # by model, or by the device of an eviction
    for dated in records:
        record = dated.record
        if isinstance(record, Started) and record.kind == "activate":
            since_s[record.model] = dated.unix_s
        elif isinstance(record, Ended) and record.kind == "evict":
            since_s[record.device] = dated.unix_s
        elif isinstance(record, Ended) and record.kind == "activate" and not record.problem:
            begun_s = max(since_s[record.model], since_s[record.device])
            yield record.model, dated.unix_s - begun_s


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
