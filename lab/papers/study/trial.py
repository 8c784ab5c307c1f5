"""Points of a study: a setup with changes and possibly an ablated policy, and its outcome."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from lab.papers.ablations import variants as ablations
from prism.errors import ConfigError
from prism_replay.outcomes import PointOutcome
from prism_sim.cluster.world import World
from prism_sim.core.columns import columns
from prism_sim.core.records import NEVER, Records
from prism_sim.output.results import results_of
from prism_sim.scenario.scenario import Scenario, load
from prism_sim.sweeps.points import Point

SERIES_POINTS = 120


class Trial(Point, frozen=True):
    variant: str = ""
    """Variant of the policy; see `lab.papers.ablations.variants`."""
    series: bool = False
    """True to keep samples over time."""


class ModelMeasure(msgspec.Struct, frozen=True):
    requests: int
    in_window: int
    """Number of requests that finished before the last arrival of the trace."""
    ended_s: float
    """Time of the last end."""
    kv_bytes: float
    """Mean KV memory until the last arrival."""
    asked_kv_bytes: float = 0.0
    """Sum of the KV memory of all its requests at full length."""


class Series(msgspec.Struct, frozen=True):
    """Samples over time, by model."""

    time_s: list[float]
    kv_bytes: dict[str, list[int]]
    waiting: dict[str, list[int]]
    """Model -> number of waiting requests."""
    tokens: list[float]
    """Output tokens per second of all models since the previous sample. The tokens of an output
    count as evenly spread from the first to the last."""


class TrialOutcome(PointOutcome, frozen=True):
    models: dict[str, ModelMeasure] = msgspec.field(default_factory=dict)
    window_s: float = 0.0
    """Time until the last arrival."""
    lost: int = 0
    """Number of requests that ended with an error."""
    gpu_bytes: int = 0
    series: Series | None = None

    def percent(self, metric: str) -> float | None:
        """Returns the attainment at SLO scale 1; None for a point that was not simulated."""
        return None if self.summary is None else 100 * self.attainment(metric, "1")

    @property
    def normalized_latency(self) -> float | None:
        return None if self.summary is None else self.summary.total.normalized_latency

    @property
    def completed_rps(self) -> float:
        """Requests per second that finished before the last arrival."""
        done = sum(model.in_window for model in self.models.values())
        return done / self.window_s if self.window_s else 0.0

    @property
    def weighted_rps(self) -> float:
        """Throughput of the models, averaged by their rates (MuxServe §4.1)."""
        requests = sum(model.requests for model in self.models.values())
        if not requests:
            return 0.0
        weighted = (m.requests * m.in_window / self.window_s for m in self.models.values())
        return sum(weighted) / requests


def simulate(trial: Trial) -> TrialOutcome:
    """Runs a trial. A ConfigError is returned as the outcome's problem."""
    try:
        scenario = load(Path(trial.config), trial.changes)
        policy = ablations.get(scenario.config.policy, trial.variant, scenario.setup.knobs)
    except ConfigError as error:
        return TrialOutcome(trial.changes, problem=str(error))
    world = World(scenario.setup, scenario.work, policy)
    records = world.run()
    found = results_of(scenario.config, world, trial.judge)
    return TrialOutcome(
        trial.changes,
        found.summary,
        found.counts,
        sum(gpu.busy for gpu in found.gpus) / len(found.gpus),
        models=_models(scenario, records),
        window_s=scenario.work.end_s,
        lost=len(records.errors),
        gpu_bytes=sum(gpu.capacity_bytes for gpu in found.gpus),
        series=_series(records) if trial.series else None,
    )


def _models(scenario: Scenario, records: Records) -> dict[str, ModelMeasure]:
    """Returns the measures of the models with requests, in the order of the setup."""
    work, table, end_s = scenario.work, columns(records), np.array(records.end_s)
    ended = end_s <= work.end_s
    tokens = np.array(work.prompt_tokens) + np.array(work.output_tokens)
    samples = [sample for sample in records.samples if sample.time_s <= work.end_s]
    found = {}
    for index, name in enumerate(work.models):
        chosen = table.model == index
        if not chosen.any():
            continue
        held = [sample.kv_bytes.get(index, 0) for sample in samples]
        found[name] = ModelMeasure(
            requests=int(chosen.sum()),
            in_window=int((chosen & table.ok & ended).sum()),
            ended_s=float(end_s[chosen].max()),
            kv_bytes=float(np.mean(held)),
            asked_kv_bytes=float(tokens[chosen].sum()) * scenario.setup.models[index].token_bytes,
        )
    return found


def _series(records: Records) -> Series:
    work = records.work
    stride = max(1, len(records.samples) // SERIES_POINTS)
    samples = records.samples[::stride]
    times = np.array([sample.time_s for sample in samples])
    arrival, model = np.array(work.arrival_s), np.array(work.model)
    started, end = np.array(records.started_s), np.array(records.end_s)
    # A request that never started waited until it was dropped.
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
