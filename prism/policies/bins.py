"""Devices as bins during placement: KVPR, remaining memory, fit (Prism §6.2).

KVPR of a device = sum of w over its models / KV memory left after their weights, where
w = token rate x KV bytes per token / TPOT SLO. Sizes in bytes, rates in tokens/s. Bins hold parts
of models: the share of a tensor-parallel model that is on each of its devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from prism.policies.data import ClusterView, GpuView, ModelView
from prism.policies.latency import busy_share, late_rps

SLACK = 0.3
"""Part of the time that a device may compute before compute affects placement."""


def weight_of(model: ModelView) -> float:
    """Returns w of Algorithm 1: the KV demand in bytes/s per second of TPOT SLO."""
    return model.token_rate * model.token_bytes / model.slo_tpot_s


def need_bytes(model: ModelView) -> int:
    """Returns the memory that a device must have left for the model to serve."""
    return model.weight_bytes + model.kv_floor_bytes


def part(model: ModelView) -> ModelView:
    """Returns the part of a model on each of its devices: 1/tp of its weight and rate.

    The part keeps the name and `tp`, but not the pin, which is for models on one device. A model
    with tp 1 is returned as it is (Prism Appendix A.1.2).
    """
    if model.tp == 1:
        return model
    return structs.replace(
        model,
        pinned_device=None,
        weight_bytes=-(-model.weight_bytes // model.tp),
        kv_floor_bytes=-(-model.kv_floor_bytes // model.tp),
        token_rate=model.token_rate / model.tp,
    )


def size_text(size_bytes: int) -> str:
    """Returns a size as text, such as "1.5 MiB"."""
    return f"{size_bytes / 2**20:.1f} MiB"


def ratio(pressure: float, shared_kv_bytes: int) -> float:
    """Returns the KVPR: 0 without pressure, infinite if weights leave no KV memory."""
    if pressure == 0:
        return 0.0
    return pressure / shared_kv_bytes if shared_kv_bytes > 0 else math.inf


@dataclass(slots=True)
class Bin:
    """Device during planning: the parts it would hold, at most one of each model."""

    gpu: GpuView
    # Largest number of parts at a time.
    engines: int
    models: dict[str, ModelView] = field(default_factory=dict)
    # KV memory left after the weights, the denominator of KVPR.
    shared_kv_bytes: int = field(init=False)
    # Memory left after weights and KV floors, available to another model.
    room_bytes: int = field(init=False)
    kvpr: float = field(init=False, default=0.0)
    # Sort key: least KVPR first, then most memory left, so that idle models spread out.
    rank: tuple[float, int, str] = field(init=False)
    _pressures: dict[str, float] = field(init=False, default_factory=dict)
    # Result of `_load`; None: not computed since the last change.
    _loaded: tuple[float, float] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.shared_kv_bytes = self.gpu.capacity_bytes - self.gpu.fixed_bytes
        self.room_bytes = self.shared_kv_bytes
        self.rank = (0.0, -self.room_bytes, self.gpu.name)
        parts, self.models = self.models, {}
        if parts:
            self.fill(parts.values())

    @property
    def name(self) -> str:
        return self.gpu.name

    @property
    def free_engines(self) -> int:
        return self.engines - len(self.models)

    def copy(self) -> Bin:
        made = Bin(self.gpu, self.engines)
        made.models = self.models.copy()
        made._pressures = self._pressures.copy()
        made.shared_kv_bytes, made.room_bytes = self.shared_kv_bytes, self.room_bytes
        made.kvpr, made.rank, made._loaded = self.kvpr, self.rank, self._loaded
        return made

    def kvpr_with(self, model: ModelView) -> float:
        """Returns the KVPR with `model` added, or replacing its part of the same name."""
        trial = self.copy()
        trial.put(model)
        return trial.kvpr

    def kvpr_without(self, names: Iterable[str]) -> float:
        gone = set(names)
        kept = {name: model for name, model in self.models.items() if name not in gone}
        return Bin(self.gpu, self.engines, kept).kvpr

    def late_with(self, model: ModelView) -> float:
        """Returns the late requests per second that `model` would add (`late_rps`).

        0 if the models here would compute for less than `SLACK` of the time.
        """
        share = busy_share(model)
        if not share or share + self._load()[0] < SLACK:
            return 0.0
        return round(late_rps([*self.models.values(), model]) - self.late_rps, 3)

    def late_without(self, name: str) -> float:
        """Returns the late requests per second of the other models here."""
        return late_rps([model for model in self.models.values() if model.name != name])

    @property
    def late_rps(self) -> float:
        """Late requests per second of the models here."""
        return self._load()[1]

    def _load(self) -> tuple[float, float]:
        """Returns the part of the time that the models here compute, and `late_rps`."""
        if self._loaded is None:
            here = self.models.values()
            share = math.fsum(map(busy_share, here))
            self._loaded = share, late_rps(here)
        return self._loaded

    def holds(self, copy: ModelView) -> bool:
        """Returns True if a part of this copy is here. Copies of a model share its name."""
        return copy.name in self.models and self.name in devices_of(copy)

    def allows(self, model: ModelView) -> bool:
        """Returns True unless the device is excluded for the model, whatever its memory.

        Excluded: a pin to another device, no live agent, a recent failure here, or another copy.
        """
        name = self.gpu.name
        if model.pinned_device not in (None, name) or not self.gpu.alive:
            return False
        if model.name in self.models:
            return False
        return model.device == name or name not in model.barred

    def fits(self, model: ModelView) -> bool:
        """Returns True if the part can be added. False if another part of the model is here."""
        return (
            len(self.models) < self.engines
            and model.weight_bytes + model.kv_floor_bytes <= self.room_bytes
            and self.allows(model)
        )

    def put(self, model: ModelView) -> None:
        """Adds a part, replacing one of the same name."""
        if model.name in self.models:
            self.take(model.name)
        self.models[model.name] = model
        self._pressures[model.name] = weight_of(model)
        self._moved(-model.weight_bytes, -model.kv_floor_bytes)

    def fill(self, parts: Iterable[ModelView]) -> None:
        """Adds parts and sums their pressures once. REQUIRES: none of them is here."""
        weight_bytes = floor_bytes = 0
        for model in parts:
            self.models[model.name] = model
            self._pressures[model.name] = weight_of(model)
            weight_bytes += model.weight_bytes
            floor_bytes += model.kv_floor_bytes
        self._moved(-weight_bytes, -floor_bytes)

    def take(self, name: str) -> ModelView:
        model = self.models.pop(name)
        del self._pressures[name]
        self._moved(model.weight_bytes, model.kv_floor_bytes)
        return model

    def limit_room(self, room_bytes: int) -> None:
        """Lowers `room_bytes` to at most this value."""
        self.room_bytes = min(self.room_bytes, room_bytes)
        self._moved(0, 0)

    def _moved(self, weight_bytes: int, kv_floor_bytes: int) -> None:
        self._loaded = None
        self.shared_kv_bytes += weight_bytes
        self.room_bytes += weight_bytes + kv_floor_bytes
        # fsum rounds once, so that the sum does not depend on the order of changes.
        self.kvpr = ratio(math.fsum(self._pressures.values()), self.shared_kv_bytes)
        self.rank = (self.kvpr, -self.room_bytes, self.gpu.name)


Bins = dict[str, Bin]


def devices_of(model: ModelView) -> tuple[str, ...]:
    """Returns the model's devices, rank 0 first; empty for a model on no device."""
    return (model.device, *model.peers) if model.device else ()


def asked_for(view: ClusterView) -> list[ModelView]:
    """Returns absent models that requests wait for or that should be resident."""
    return [m for m in view.models if m.state == "absent" and (m.wanted or m.waiting)]


def empty_bins(models: Iterable[ModelView], gpus: Iterable[GpuView]) -> Bins:
    """Returns bins without models. Engines that serve a model now are included in `engines`."""
    held: dict[str, int] = {}
    for model in models:
        for device in devices_of(model):
            held[device] = held.get(device, 0) + 1
    return {gpu.name: Bin(gpu, gpu.engines_free + held.get(gpu.name, 0)) for gpu in gpus}


def current_bins(
    models: Sequence[ModelView],
    gpus: Iterable[GpuView],
    staying: Sequence[ModelView] | None = None,
) -> Bins:
    """Returns bins with the models on each device now, except models that are draining.

    If `staying` is given, only those models are in the bins.
    """
    bins = empty_bins(models, gpus)
    held: dict[str, dict[str, ModelView]] = {}
    for model in models if staying is None else staying:
        if model.device is not None and model.state != "draining":
            piece = part(model)
            for device in devices_of(model):
                if device in bins:
                    held.setdefault(device, {})[model.name] = piece
    for device, parts in held.items():
        bins[device].fill(parts.values())
    return bins


# --- reasons -------------------------------------------------------------------------------


def shortfall(model: ModelView, bins: Bins) -> str:
    """Returns why the model fits on none of the bins, with the device that comes closest."""
    allowed = [b for b in bins.values() if b.allows(model)]
    if not allowed:
        return _nowhere(model, bins)
    if model.tp > 1:
        return _too_few(model, allowed)
    closest = min(allowed, key=lambda b: (b.free_engines <= 0, -b.room_bytes, b.name))
    missing = need_bytes(model) - closest.room_bytes
    if missing > 0:
        return (
            f"{missing} bytes ({size_text(missing)}) are missing on {closest.name}: weights and KV "
            f"floor need {size_text(need_bytes(model))}, {size_text(closest.room_bytes)} are left"
        )
    return f"no engine is free on {closest.name}: all {closest.engines} serve a model"


def _too_few(model: ModelView, allowed: Sequence[Bin]) -> str:
    fitting = Counter(b.gpu.node for b in allowed if b.fits(model))
    most = max(fitting.values(), default=0)
    return (
        f"its {model.tp} parts need {size_text(need_bytes(model))} and an engine on each of "
        f"{model.tp} devices of one node; at most {most} have both"
    )


def _nowhere(model: ModelView, bins: Bins) -> str:
    if model.pinned_device is not None and model.pinned_device not in bins:
        return f"its device {model.pinned_device} is not in the cluster"
    possible = [b.gpu for b in bins.values() if model.pinned_device in (None, b.name)]
    if not any(gpu.alive for gpu in possible):
        drained = ", ".join(sorted(gpu.name for gpu in possible if gpu.drained))
        where = model.pinned_device or "any device"
        return f"operators drain {drained}" if drained else f"no agent answers on {where}"
    return "its activation failed recently on " + ", ".join(model.barred)
