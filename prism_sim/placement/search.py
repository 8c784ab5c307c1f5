"""Inputs of placement searches: cluster, models, recent requests, and a simulator (AlpaServe §4,
MuxServe §3.2, SeaLLM §4.1)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from prism.policies.data import Traffic
from prism.policies.placement import (
    DeviceSpecView,
    ModelSpecView,
    Placement,
    PlacementOutcome,
    Problem,
    StepTimes,
)
from prism.policies.policy import Policy
from prism_replay.metrics import met, normalized_latency
from prism_sim.core import profile
from prism_sim.core.columns import columns
from prism_sim.core.profile import ModelLoad
from prism_sim.core.records import Records
from prism_sim.core.setup import ClusterSetup
from prism_sim.core.workload import Workload
from prism_sim.costs.model import PromptChunk, slowdown
from prism_sim.placement.independent import PartwiseSimulation

SEARCH_RATES = ("mean", "peak", "equal")
PIECES = 10
WINDOWS = 6
"""Number of pieces of the trace from which a sample is taken, so that it covers a model's idle and
busy times."""
LATENCY_DIGITS = 6
"""Digits after the point of normalised latencies (1: a request that runs alone). Further digits are
rounding errors of step times, and would decide between equally good placements."""


def problem(
    setup: ClusterSetup,
    policy: Policy,
    loads: Sequence[ModelLoad],
    simulate: Callable[[Placement, Workload], Records],
    work: Workload,
) -> Problem:
    """Returns the input of a search. simulate: Runs a workload on a placement with the policy's own
    scheduling."""
    sample = sample_of(work, setup.search_requests)
    given = expected(loads, work, setup.search_rates)

    def outcome_of(placement: Placement) -> PlacementOutcome:
        return outcome(simulate(placement, sample), loads)

    return _problem(setup, given, PartwiseSimulation(setup, policy, outcome_of))


def expected(loads: Sequence[ModelLoad], work: Workload, rates: str) -> list[ModelLoad]:
    """Returns the loads that the search assumes.

    rates: "mean": Mean rates over the workload, as in the papers. "peak": The rate of each model in
    its busiest of PIECES equal pieces. "equal": The same rate for all models.
    """
    if rates == "mean":
        return list(loads)
    if rates == "equal":
        mean = sum(load.rate_rps for load in loads) / max(1, len(loads))
        return [replace(load, rate_rps=mean) for load in loads]
    each_s = max(work.end_s, 1.0) / PIECES
    counts = [[0] * PIECES for _ in loads]
    for model, arrival_s in zip(work.model, work.arrival_s, strict=True):
        counts[model][min(PIECES - 1, int(arrival_s / each_s))] += 1
    pairs = zip(loads, counts, strict=True)
    return [replace(load, rate_rps=max(count) / each_s) for load, count in pairs]


def expected_traffic(setup: ClusterSetup, work: Workload) -> dict[str, Traffic]:
    """Returns `ModelView.expected` by model, from the loads that searches assume."""
    given = expected(profile.loads(setup, work), work, setup.search_rates)
    return {
        model.name: Traffic(
            mean_rps=load.rate_rps,
            prompt_tokens=load.prompt_tokens,
            output_tokens=load.output_tokens,
        )
        for model, load in zip(setup.models, given, strict=True)
    }


def _problem(
    setup: ClusterSetup,
    loads: Sequence[ModelLoad],
    simulate: Callable[[Placement], PlacementOutcome],
) -> Problem:
    models = tuple(
        ModelSpecView(
            name=model.name,
            weight_bytes=model.weight_bytes,
            share_bytes=model.share_bytes,
            token_bytes=model.token_bytes,
            kv_floor_bytes=model.kv_floor_bytes,
            rate_rps=load.rate_rps,
            prompt_tokens=load.prompt_tokens,
            output_tokens=load.output_tokens,
            slo_s=load.slo_s,
            tp_degrees=tuple(model.parts),
            tp=model.tp,
            replicas_max=model.replicas_max,
        )
        for model, load in zip(setup.models, loads, strict=True)
    )
    devices = tuple(
        DeviceSpecView(d.name, d.capacity_bytes, d.node, d.engines) for d in setup.devices
    )
    return Problem(models, devices, step_times(setup), simulate)


def step_times(setup: ClusterSetup) -> StepTimes:
    """Returns the step times of the simulator's cost models."""
    parts = {model.name: model.parts for model in setup.models}

    @lru_cache(maxsize=1 << 16)
    def prefill_s(model: str, tp: int, batch: int, tokens: float, sm_share: float) -> float:
        cost = parts[model][tp].cost
        chunks = (PromptChunk(max(1, round(tokens))),) * batch
        return cost.step_s(chunks, 0, 0) * slowdown(cost.usage(chunks, 0, 0), sm_share)

    @lru_cache(maxsize=1 << 16)
    def decode_s(model: str, tp: int, batch: int, tokens: float, sm_share: float) -> float:
        cost, context = parts[model][tp].cost, round(batch * tokens)
        return cost.decode_s(batch, context) * slowdown(cost.usage((), batch, context), sm_share)

    return StepTimes(prefill_s, decode_s)


def outcome(records: Records, loads: Sequence[ModelLoad]) -> PlacementOutcome:
    """Returns the outcome of a simulated placement.

    A request is unserved if it missed its end-to-end SLO or failed. Latencies are rounded, so that
    they do not depend on the mode of `steps`.
    """
    found, names = columns(records, loads), records.work.models
    served = met(found, 1.0)["e2e"]
    by_model = [found.model == index for index in range(len(names))]
    latencies = [normalized_latency(found.where(served & own)) or 0.0 for own in by_model]
    return PlacementOutcome(
        {name: int(own.sum()) for name, own in zip(names, by_model, strict=True)},
        {name: int((own & ~served).sum()) for name, own in zip(names, by_model, strict=True)},
        {name: round(x, LATENCY_DIGITS) for name, x in zip(names, latencies, strict=True)},
    )


def sample_of(work: Workload, size: int) -> Workload:
    """Returns at most `size` requests: WINDOWS evenly spaced pieces of the workload, joined."""
    if len(work) <= size:
        return work
    each = size // WINDOWS
    starts = [round(i * (len(work) - each) / (WINDOWS - 1)) for i in range(WINDOWS)]
    indices = [start + i for start in starts for i in range(each)]
    columns = {name: getattr(work, name) for name in Workload.__slots__[1:-1]}
    cut = {name: array(c.typecode, (c[i] for i in indices)) for name, c in columns.items()}
    shift_s = 0.0
    pause_s = work.end_s / len(work)
    for n, start in enumerate(starts):
        shift_s = shift_s - work.arrival_s[start]
        for i in range(n * each, (n + 1) * each):
            cut["arrival_s"][i] += shift_s
        shift_s = cut["arrival_s"][(n + 1) * each - 1] + pause_s
    hashes = [work.hashes[i] for i in indices] if work.hashes else ()
    return Workload(work.models, **cut, hashes=hashes)
