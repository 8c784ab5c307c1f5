"""SLOs as in the papers: P95 latencies of each model on dedicated GPUs (Prism §7.2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from prism.policies import registry
from prism.policies.placement import Hosted, Placement, Unit
from prism_replay.metrics import latency
from prism_replay.results import METRICS
from prism_sim.cluster.world import World
from prism_sim.core.columns import columns
from prism_sim.core.setup import ClusterSetup, DeviceSetup
from prism_sim.core.workload import Workload


class Slos(NamedTuple):
    """SLOs in seconds."""

    ttft_s: float
    tpot_s: float
    e2e_s: float


def base_slos(setup: ClusterSetup, work: Workload) -> list[Slos]:
    """Returns for each model the P95 of its requests on as many dedicated GPUs as its tp. A model
    without requests gets the maximum over the other models."""
    devices: list[DeviceSetup] = []
    units: list[Unit] = []
    for model in setup.models:
        ranks = [f"{model.name}/{rank}" for rank in range(model.tp)]
        like = setup.devices[0]
        devices += [replace(like, name=name, node=model.name) for name in ranks]
        units.append(Unit(tuple(ranks), (Hosted(model.name),)))
    alone = replace(
        setup,
        devices=tuple(devices),
        models=tuple(replace(m, pinned_device=None) for m in setup.models),
        warm=True,
    )
    policy = registry.get("dedicated")
    found = columns(World(alone, work, policy, Placement(tuple(units))).run())
    groups = [found.where(found.ok & (found.model == model.index)) for model in setup.models]
    parts = ([latency(getattr(g, f"{m}_ms")).p95 for g in groups] for m in METRICS)
    return [Slos(*values) for values in zip(*map(_seconds, parts), strict=True)]


def with_base_slos(
    setup: ClusterSetup, work: Workload, base: Workload, scale: float
) -> ClusterSetup:
    """Returns the cluster with the SLOs from `base`, times `scale`. Overwrites the SLOs in
    `work`."""
    found = [Slos(*(scale * time_s for time_s in slos)) for slos in base_slos(setup, base)]
    for i, model in enumerate(work.model):
        work.slo_ttft_s[i], work.slo_tpot_s[i], work.slo_e2e_s[i] = found[model]
    models = (
        replace(model, slo_ttft_s=slo.ttft_s, slo_tpot_s=slo.tpot_s)
        for model, slo in zip(setup.models, found, strict=True)
    )
    return replace(setup, models=tuple(models))


def _seconds(values_ms: Iterable[float | None]) -> list[float]:
    """Returns the values in seconds, with the maximum in place of None."""
    values = [None if value_ms is None else value_ms / 1000 for value_ms in values_ms]
    largest = max((value for value in values if value is not None), default=1.0)
    return [largest if value is None else value for value in values]
