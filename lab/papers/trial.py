"""A point of a study: a setup, changes, perhaps an ablated policy; and what is measured of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from lab.papers import ablations
from prism.errors import ConfigError
from prism_sim.cluster.world import World
from prism_sim.core.profile import loads
from prism_sim.core.records import NEVER, Records
from prism_sim.output.results import results_of
from prism_sim.output.summary import Columns, columns
from prism_sim.scenario.scenario import Scenario, load
from prism_sim.sweeps.points import Point, PointOutcome

SERIES_POINTS = 120


class Trial(Point, frozen=True):
    variant: str = ""
    """Of the policy; see `lab.papers.ablations`."""
    series: bool = False
    """Keep samples over time."""


class ModelMeasure(msgspec.Struct, frozen=True):
    requests: int
    in_window: int
    """Requests that ended while others still arrived."""
    normalized_latency: float | None
    """Mean latency of the served requests over the mean execution time of a request alone (SeaLLM
    eq. 1)."""
    ttft: float
    tpot: float
    """Attainments."""
    kv_bytes: float
    """Mean KV memory while requests arrive."""
    asked_kv_bytes: float = 0.0
    """Of all its requests together, each at full length."""


class Series(msgspec.Struct, frozen=True):
    """Samples over time, by model."""

    time_s: list[float]
    kv_bytes: dict[str, list[int]]
    waiting: dict[str, list[int]]
    """Requests."""
    tokens: list[float]
    """Output tokens per second of all models since the last sample. An output counts as evenly
    spread from its first token to its last."""


class TrialOutcome(PointOutcome, frozen=True):
    models: dict[str, ModelMeasure] = msgspec.field(default_factory=dict)
    window_s: float = 0.0
    """Until the last arrival."""
    normalized_latency: float | None = None
    lost: int = 0
    """Requests that ended with an error."""
    gpu_bytes: int = 0
    series: Series | None = None

    def percent(self, metric: str) -> float | None:
        """Attainment at SLO scale 1; None for a point that could not be simulated."""
        return None if self.summary is None else 100 * self.attainment(metric, "1")

    @property
    def completed_rps(self) -> float:
        """Requests that ended while others still arrived, per second."""
        done = sum(model.in_window for model in self.models.values())
        return done / self.window_s if self.window_s else 0.0

    @property
    def weighted_rps(self) -> float:
        """Throughputs of the models, averaged by their rates (MuxServe §4.1)."""
        requests = sum(model.requests for model in self.models.values())
        if not requests:
            return 0.0
        parts = (m.requests * m.in_window / self.window_s for m in self.models.values())
        return sum(parts) / requests


def simulate(trial: Trial) -> TrialOutcome:
    """Raises nothing for a ConfigError: it is the outcome."""
    try:
        scenario = load(Path(trial.config), trial.changes)
        policy = ablations.get(scenario.config.policy, trial.variant, scenario.setup.knobs)
    except ConfigError as error:
        return TrialOutcome(trial.changes, problem=str(error))
    world = World(scenario.setup, scenario.work, policy)
    records = world.run()
    found = results_of(scenario.config, world, trial.judge)
    table = columns(records)
    execution_s = np.array([load.execution_s for load in loads(scenario.setup, scenario.work)])
    return TrialOutcome(
        trial.changes,
        found.summary,
        found.counts,
        sum(gpu.busy for gpu in found.gpus) / len(found.gpus),
        models=_models(scenario, records, table, execution_s),
        window_s=scenario.work.end_s,
        normalized_latency=_mean_normalized(table, execution_s),
        lost=len(records.errors),
        gpu_bytes=sum(gpu.capacity_bytes for gpu in found.gpus),
        series=_series(records) if trial.series else None,
    )


def _models(
    scenario: Scenario, records: Records, table: Columns, execution_s: NDArray[np.float64]
) -> dict[str, ModelMeasure]:
    """In the order of the setup; models without requests are left out."""
    work = scenario.work
    ended = np.array(records.end_s) <= work.end_s
    tokens = np.array(work.prompt_tokens) + np.array(work.output_tokens)
    samples = [sample for sample in records.samples if sample.time_s <= work.end_s]
    found = {}
    for index, name in enumerate(work.models):
        chosen = table.model == index
        if not chosen.any():
            continue
        served = table.e2e_ms[chosen & table.ok]
        held = [sample.kv_bytes.get(index, 0) for sample in samples]
        found[name] = ModelMeasure(
            requests=int(chosen.sum()),
            in_window=int((chosen & table.ok & ended).sum()),
            normalized_latency=float(served.mean() / 1000 / execution_s[index])
            if len(served)
            else None,
            ttft=float((table.ok & (table.ttft_ms <= table.slo_ttft_ms))[chosen].mean()),
            tpot=float((table.ok & ~(table.tpot_ms > table.slo_tpot_ms))[chosen].mean()),
            kv_bytes=float(np.mean(held)),
            asked_kv_bytes=float(tokens[chosen].sum()) * scenario.setup.models[index].token_bytes,
        )
    return found


def _mean_normalized(table: Columns, execution_s: NDArray[np.float64]) -> float | None:
    """Over all served requests."""
    served = table.ok
    if not served.any():
        return None
    return float((table.e2e_ms[served] / 1000 / execution_s[table.model[served]]).mean())


def _series(records: Records) -> Series:
    work = records.work
    stride = max(1, len(records.samples) // SERIES_POINTS)
    samples = records.samples[::stride]
    times = np.array([sample.time_s for sample in samples])
    arrival, model = np.array(work.arrival_s), np.array(work.model)
    started, end = np.array(records.started_s), np.array(records.end_s)
    # one that never started waited until it was given up
    leaves = np.where(started == NEVER, end, started)
    waiting = {
        name: [
            int(((arrival <= t) & (leaves > t) & (model == index)).sum()) for t in times.tolist()
        ]
        for index, name in enumerate(work.models)
    }
    return Series(
        time_s=[round(t, 3) for t in times.tolist()],
        kv_bytes={
            name: [sample.kv_bytes.get(index, 0) for sample in samples]
            for index, name in enumerate(work.models)
        },
        waiting=waiting,
        tokens=[round(rate, 3) for rate in _token_rates(records, times)],
    )


def _token_rates(records: Records, times: NDArray[np.float64]) -> list[float]:
    first, end = np.array(records.first_s), np.array(records.end_s)
    served = first != NEVER
    first, length = first[served], np.maximum(end[served] - first[served], 1e-9)
    tokens = np.array(records.output_tokens)[served]
    until = [float((tokens * np.clip((t - first) / length, 0.0, 1.0)).sum()) for t in times]
    rates = np.diff(until) / np.maximum(np.diff(times), 1e-9)
    return [0.0, *rates.tolist()]
