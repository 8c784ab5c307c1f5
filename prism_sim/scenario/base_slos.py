"""SLOs as in the papers: P95 latencies of each model on dedicated GPUs (Prism §7.2)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from prism.policies import registry
from prism.policies.placement import Hosted, Placement, Unit
from prism_sim.cluster.world import World
from prism_sim.core.records import Records
from prism_sim.core.setup import ClusterSetup, DeviceSetup
from prism_sim.core.workload import Workload

Latencies = tuple[float, float]
"""(TTFT, TPOT) in seconds."""


def base_slos(setup: ClusterSetup, work: Workload) -> list[Latencies]:
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
    return _p95(World(alone, work, policy, Placement(tuple(units))).run())


def with_base_slos(
    setup: ClusterSetup, work: Workload, base: Workload, scale: float
) -> ClusterSetup:
    """Returns the cluster with the SLOs from `base`, times `scale`. Overwrites the SLOs in
    `work`."""
    found = [(ttft_s * scale, tpot_s * scale) for ttft_s, tpot_s in base_slos(setup, base)]
    for i, model in enumerate(work.model):
        ttft_s, tpot_s = found[model]
        work.slo_ttft_s[i], work.slo_tpot_s[i] = ttft_s, tpot_s
        work.slo_e2e_s[i] = ttft_s + tpot_s * (work.output_tokens[i] - 1)
    models = (
        replace(model, slo_ttft_s=slo[0], slo_tpot_s=slo[1])
        for model, slo in zip(setup.models, found, strict=True)
    )
    return replace(setup, models=tuple(models))


def _p95(records: Records) -> list[Latencies]:
    work = records.work
    ttfts_s: list[list[float]] = [[] for _ in work.models]
    tpots_s: list[list[float]] = [[] for _ in work.models]
    for i, model in enumerate(work.model):
        if i not in records.errors:
            ttfts_s[model].append(records.first_s[i] - work.arrival_s[i])
            if work.output_tokens[i] > 1:
                seconds = records.end_s[i] - records.first_s[i]
                tpots_s[model].append(seconds / (work.output_tokens[i] - 1))
    return list(zip(_percentiles(ttfts_s), _percentiles(tpots_s), strict=True))


def _percentiles(groups: list[list[float]]) -> list[float]:
    found = [float(np.percentile(group, 95)) if group else None for group in groups]
    largest = max((value for value in found if value is not None), default=1.0)
    return [largest if value is None else value for value in found]
