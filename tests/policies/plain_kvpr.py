"""Algorithm 1 as written, looking at every device for every model: what `kvpr.place` must equal."""

from __future__ import annotations

from collections.abc import Sequence

from prism.policies import kvpr
from prism.policies.bins import Bin, Bins, empty_bins, shortfall
from prism.policies.data import GpuView, ModelView


def place(models: Sequence[ModelView], gpus: Sequence[GpuView], tau: float) -> kvpr.Assignment:
    """Runs Algorithm 1 without heaps, for models with tp 1."""
    bins = _greedy(models, gpus, tau)
    if _placed(bins) < len(models):
        packed = _packed(models, gpus, bins)
        bins = packed if _placed(packed) > _placed(bins) else bins
    homes = {name: (b.name,) for b in bins.values() for name in b.models}
    refused = {m.name: shortfall(m, bins) for m in models if m.name not in homes}
    return kvpr.Assignment(homes, refused, {b.name: b.kvpr for b in bins.values()})


def least_pressed(model: ModelView, bins: Bins) -> Bin | None:
    """Returns the least pressed bin that fits. REQUIRES: no bin holds a part of the model."""
    fitting = (b for b in bins.values() if b.fits(model))
    return min(fitting, key=lambda b: b.rank, default=None)


def _placed(bins: Bins) -> int:
    return sum(len(b.models) for b in bins.values())


def _greedy(models: Sequence[ModelView], gpus: Sequence[GpuView], tau: float) -> Bins:
    bins = empty_bins(models, gpus)
    for model in sorted(models, key=kvpr.by_pressure):
        best = least_pressed(model, bins)
        current = bins.get(model.device) if model.device else None
        if best is not None and current is not None and current.fits(model):
            best = best if best.kvpr < current.kvpr * (1 - tau) else current
        if best is not None:
            best.put(model)
    return bins


def _packed(models: Sequence[ModelView], gpus: Sequence[GpuView], first: Bins) -> Bins:
    bins = empty_bins(models, gpus)
    for b in first.values():
        for model in b.models.values():
            if model.device:
                bins[b.name].put(model)
    for model in sorted((m for m in models if m.device is None), key=kvpr.by_size):
        fitting = (b for b in bins.values() if b.fits(model))
        tightest = min(fitting, key=lambda b: (b.room_bytes, b.name), default=None)
        if tightest is not None:
            tightest.put(model)
    return bins
