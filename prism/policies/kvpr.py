"""KV pressure ratio and Algorithm 1 (Prism §6.2, bound in Appendix A.1).

KVPR of a device = sum of w over its models / KV memory left after their weights, where
w = token rate x KV bytes per token / TPOT SLO. Pure functions; sizes in bytes, rates in tokens/s.

The paper's algorithm ignores whether a model fits; here only devices where weights and KV floor
fit, and where an engine is free, are candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prism.policies.data import GpuView, ModelView


def weight_of(model: ModelView) -> float:
    """w of Algorithm 1: the SLO-weighted KV demand in bytes/s per second of TPOT SLO."""
    return model.token_rate * model.token_bytes / model.slo_tpot_s


def need_bytes(model: ModelView) -> int:
    """What a device must have left for the model to serve at all."""
    return model.weight_bytes + model.kv_floor_bytes


def size_text(size_bytes: int) -> str:
    """Bytes for people: "1.5 MiB"."""
    return f"{size_bytes / 2**20:.1f} MiB"


@dataclass(slots=True)
class Bin:
    """A device while a plan is being made: which models it would hold, and what is left.

    `engines`: how many models it can hold at a time.
    """

    gpu: GpuView
    engines: int
    models: dict[str, ModelView] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.gpu.name

    @property
    def shared_kv_bytes(self) -> int:
        """KV memory left after the weights: the denominator of KVPR."""
        weights = sum(model.weight_bytes for model in self.models.values())
        return self.gpu.capacity_bytes - self.gpu.fixed_bytes - weights

    @property
    def room_bytes(self) -> int:
        """What is left after weights and KV floors: the most that another model may need."""
        return self.shared_kv_bytes - sum(m.kv_floor_bytes for m in self.models.values())

    @property
    def free_engines(self) -> int:
        return self.engines - len(self.models)

    @property
    def kvpr(self) -> float:
        pressure = math.fsum(weight_of(model) for model in self.models.values())
        if pressure == 0:
            return 0.0
        return pressure / self.shared_kv_bytes if self.shared_kv_bytes > 0 else math.inf

    def kvpr_with(self, model: ModelView) -> float:
        return Bin(self.gpu, self.engines, {**self.models, model.name: model}).kvpr

    def kvpr_without(self, names: Iterable[str]) -> float:
        gone = set(names)
        kept = {name: model for name, model in self.models.items() if name not in gone}
        return Bin(self.gpu, self.engines, kept).kvpr

    def allows(self, model: ModelView) -> bool:
        """May the model be here at all: pinned elsewhere, agent gone, failed here just now."""
        if model.pinned_device not in (None, self.name) or not self.gpu.alive:
            return False
        return model.device == self.name or self.name not in model.barred

    def fits(self, model: ModelView) -> bool:
        return self.allows(model) and self.free_engines > 0 and need_bytes(model) <= self.room_bytes

    def put(self, model: ModelView) -> None:
        self.models[model.name] = model

    def take(self, name: str) -> ModelView:
        return self.models.pop(name)


Bins = dict[str, Bin]


@dataclass(frozen=True, slots=True)
class Placement:
    """`devices`: model -> device. `refused`: model -> why it fits nowhere. `kvpr`: per device."""

    devices: Mapping[str, str]
    refused: Mapping[str, str]
    kvpr: Mapping[str, float]


def empty_bins(models: Iterable[ModelView], gpus: Iterable[GpuView]) -> Bins:
    """Bins with nothing in them; an engine that serves a model now counts as one of the bin's."""
    homes = [model.device for model in models if model.device]
    return {gpu.name: Bin(gpu, gpu.engines_free + homes.count(gpu.name)) for gpu in gpus}


def current_bins(models: Sequence[ModelView], gpus: Iterable[GpuView]) -> Bins:
    """Bins as the cluster is now, without the models that are on their way out."""
    bins = empty_bins(models, gpus)
    for model in models:
        if model.device in bins and model.state != "draining":
            bins[model.device].put(model)
    return bins


def _mobility(model: ModelView) -> int:
    """0: stays where it is; 1: goes to one device only; 2: goes anywhere. The freest come last,
    since the others could not make way for them."""
    if model.pinned_device is None:
        return 2
    return 0 if model.device == model.pinned_device else 1


def by_pressure(model: ModelView) -> tuple[int, float, int, str]:
    """Algorithm 1's order: largest w first, then size, then name; pinned models before all."""
    return (_mobility(model), -weight_of(model), -need_bytes(model), model.name)


def by_size(model: ModelView) -> tuple[int, int, str]:
    return (_mobility(model), -need_bytes(model), model.name)


def least_pressed(model: ModelView, bins: Bins) -> Bin | None:
    """The candidate with the least KVPR; equal ones by room, so that idle models spread out."""
    fitting = (b for b in bins.values() if b.fits(model))
    return min(fitting, key=lambda b: (b.kvpr, -b.room_bytes, b.name), default=None)


def choose(model: ModelView, bins: Bins, tau: float) -> Bin | None:
    """Algorithm 1, lines 5-8: the least pressed device, or the current one when moving the
    model would gain at most `tau` of its KVPR."""
    best = least_pressed(model, bins)
    current = bins.get(model.device) if model.device else None
    if best is None or current is None or not current.fits(model):
        return best
    return best if best.kvpr < current.kvpr * (1 - tau) else current


def gain(before: float, after: float) -> float:
    """The part of a pressure that a change removes; 0 where there was none."""
    if before <= 0:
        return 0.0
    return 1.0 if math.isinf(before) and not math.isinf(after) else (before - after) / before


def place(models: Sequence[ModelView], gpus: Sequence[GpuView], tau: float) -> Placement:
    """Algorithm 1: a device for every model, greedily by pressure.

    Models that no device has room for are tried again largest first, with those that are
    nowhere yet packed by size; what then still does not fit is refused with the bytes missing.
    Deterministic; no device is ever filled beyond capacity. For tau = 0 and where everything
    fits, max KVPR <= optimum x (1 + C / (S - m)) (Appendix A.1).
    """
    bins = _greedy(models, gpus, tau)
    if _placed(bins) < len(models):
        packed = _packed(models, gpus, bins)
        bins = packed if _placed(packed) > _placed(bins) else bins
    devices = {name: b.name for b in bins.values() for name in b.models}
    refused = {m.name: shortfall(m, bins) for m in models if m.name not in devices}
    return Placement(devices, refused, {b.name: b.kvpr for b in bins.values()})


def _placed(bins: Bins) -> int:
    return sum(len(b.models) for b in bins.values())


def _greedy(models: Sequence[ModelView], gpus: Sequence[GpuView], tau: float) -> Bins:
    bins = empty_bins(models, gpus)
    for model in sorted(models, key=by_pressure):
        home = choose(model, bins, tau)
        if home is not None:
            home.put(model)
    return bins


def _packed(models: Sequence[ModelView], gpus: Sequence[GpuView], first: Bins) -> Bins:
    """Best fit by decreasing size, for models that are nowhere yet; the others stay put."""
    bins = empty_bins(models, gpus)
    resident = [(b, m) for b in first.values() for m in b.models.values() if m.device]
    for b, model in resident:
        bins[b.name].put(model)
    for model in sorted((m for m in models if m.device is None), key=by_size):
        fitting = (b for b in bins.values() if b.fits(model))
        tightest = min(fitting, key=lambda b: (b.room_bytes, b.name), default=None)
        if tightest is not None:
            tightest.put(model)
    return bins


def shortfall(model: ModelView, bins: Bins) -> str:
    """Why the model fits on none of the bins; names the device that comes closest."""
    allowed = [b for b in bins.values() if b.allows(model)]
    if not allowed:
        return _nowhere(model, bins)
    closest = min(allowed, key=lambda b: (b.free_engines <= 0, -b.room_bytes, b.name))
    missing = need_bytes(model) - closest.room_bytes
    if missing > 0:
        return (
            f"{missing} bytes ({size_text(missing)}) are missing on {closest.name}: weights and KV "
            f"floor need {size_text(need_bytes(model))}, {size_text(closest.room_bytes)} are left"
        )
    return f"no engine is free on {closest.name}: all {closest.engines} serve a model"


def _nowhere(model: ModelView, bins: Bins) -> str:
    if model.pinned_device is not None and model.pinned_device not in bins:
        return f"its device {model.pinned_device} is not in the cluster"
    if not any(b.gpu.alive for b in bins.values() if model.pinned_device in (None, b.name)):
        return "no agent answers on " + (model.pinned_device or "any device")
    return "its activation failed a moment ago on " + ", ".join(model.barred)
