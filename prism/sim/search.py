"""Placement searches: what they are given of the cluster, the models and the recent requests, and
the simulator inside (AlpaServe §4, MuxServe §3.2, SeaLLM §4.1)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache

from prism.costs.model import Chunk, slowdown
from prism.policies.placement import (
    DeviceSpecView,
    ModelSpecView,
    Outcome,
    Placement,
    Problem,
    Search,
    StepTimes,
)
from prism.sim.profile import Load
from prism.sim.records import Records
from prism.sim.setup import ClusterSetup
from prism.sim.workload import Workload

SEARCHED_REQUESTS = 600
"""The recent requests that a placement is tried on: the tuning budget of every policy that has a
simulator inside, together with what the searches themselves bound."""


def search(
    find: Search,
    setup: ClusterSetup,
    loads: Sequence[Load],
    play: Callable[[Placement, Workload], Records],
    work: Workload,
) -> Placement:
    """play: simulates a workload on a placement with the policy's own scheduling."""
    sample = first_requests(work, SEARCHED_REQUESTS)

    def simulate(placement: Placement) -> Outcome:
        return outcome(play(placement, sample), loads)

    return find(problem(setup, loads, simulate))


def problem(
    setup: ClusterSetup, loads: Sequence[Load], simulate: Callable[[Placement], Outcome]
) -> Problem:
    models = tuple(
        ModelSpecView(
            name=model.name,
            weight_bytes=model.weight_bytes,
            token_bytes=model.token_bytes,
            kv_floor_bytes=model.kv_floor_bytes,
            rate_rps=load.rate_rps,
            prompt_tokens=load.prompt_tokens,
            output_tokens=load.output_tokens,
            slo_s=load.slo_s,
            tp_degrees=tuple(model.parts),
            max_context_tokens=load.longest_tokens,
        )
        for model, load in zip(setup.models, loads, strict=True)
    )
    devices = tuple(DeviceSpecView(d.name, d.capacity_bytes, d.node) for d in setup.devices)
    return Problem(models, devices, step_times(setup), simulate)


def step_times(setup: ClusterSetup) -> StepTimes:
    """Of the simulator's own cost models."""
    parts = {model.name: model.parts for model in setup.models}

    @lru_cache(maxsize=1 << 16)
    def prefill_s(model: str, tp: int, batch: int, tokens: float, sm_share: float) -> float:
        cost = parts[model][tp].cost
        chunks = (Chunk(max(1, round(tokens))),) * batch
        return cost.step_s(chunks, 0, 0) * slowdown(cost.usage(chunks, 0, 0), sm_share)

    @lru_cache(maxsize=1 << 16)
    def decode_s(model: str, tp: int, batch: int, tokens: float, sm_share: float) -> float:
        cost, context = parts[model][tp].cost, round(batch * tokens)
        return cost.decode_s(batch, context) * slowdown(cost.usage((), batch, context), sm_share)

    return StepTimes(prefill_s, decode_s)


def outcome(records: Records, loads: Sequence[Load]) -> Outcome:
    """Unserved: missed its end-to-end SLO, or never served."""
    work = records.work
    names = work.models
    requests, unserved = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    normalized: dict[str, list[float]] = {name: [] for name in names}
    for i, model in enumerate(work.model):
        requests[names[model]] += 1
        latency_s = records.end_s[i] - work.arrival_s[i]
        if i in records.errors or latency_s > work.slo_e2e_s[i]:
            unserved[names[model]] += 1
        else:
            normalized[names[model]].append(latency_s / loads[model].execution_s)
    means = {name: sum(v) / len(v) if v else 0.0 for name, v in normalized.items()}
    return Outcome(requests, unserved, means)


def first_requests(work: Workload, size: int) -> Workload:
    """The workload's beginning."""
    if len(work) <= size:
        return work
    columns = (getattr(work, name) for name in Workload.__slots__[1:])
    cut: list[array[float]] = [column[:size] for column in columns]
    return Workload(work.models, *cut)  # type: ignore[arg-type]
