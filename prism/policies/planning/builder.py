"""Builder of the prism policy's plans (Prism §6.2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import structs

from prism.policies.bins import Bin, Bins, devices_of, need_bytes, part
from prism.policies.data import (
    Action,
    Activate,
    ClusterView,
    GpuView,
    Migrate,
    ModelView,
    Refuse,
    Settings,
)

PRESSED_FREE = 0.25
"""Fraction of free memory below which a device may run out of it during the next burst."""


@dataclass(slots=True)
class PlanBuilder:
    """Plan under construction."""

    view: ClusterView
    settings: Settings
    # Devices with the effects of `actions`.
    bins: Bins
    actions: list[Action] = field(default_factory=list)
    # Names of the models that are given up (`overload.py`).
    given_up: set[str] = field(default_factory=set)
    # Model -> its copies, for models with several; copies in activation are included.
    copies: dict[str, list[ModelView]] = field(init=False)

    def __post_init__(self) -> None:
        found: dict[str, list[ModelView]] = {}
        for model in self.view.models:
            found.setdefault(model.name, []).append(model)
        self.copies = {name: views for name, views in found.items() if len(views) > 1}

    def held_by(self, model: ModelView) -> list[Bin]:
        """Returns the bins of the model's devices."""
        return [self.bins[device] for device in devices_of(model) if device in self.bins]

    def fitting_alone(self, models: Iterable[ModelView]) -> set[str]:
        """Returns the names of the models that fit on devices without any other model."""
        empty = [Bin(b.gpu, b.engines) for b in self.bins.values()]
        parts = map(part, models)
        return {model.name for model in parts if sum(b.fits(model) for b in empty) >= model.tp}

    def is_changing(self, name: str) -> bool:
        """Returns True if no other action of the model is possible now.

        It has an action in this plan, or one of several copies is not in the state "active".
        """
        if any(action.model == name for action in self.actions):
            return True
        return any(copy.state != "active" for copy in self.copies.get(name, ()))

    def copied_bins(self) -> Bins:
        return {name: b.copy() for name, b in self.bins.items()}

    def spare_bins(self) -> Bins:
        """Returns copies of the bins, with only memory as room that nothing needs now.

        Of a device with busy models, `PRESSED_FREE` is kept for their next burst.
        """
        found = self.copied_bins()
        for b in found.values():
            here = b.models.values()
            planned_bytes = sum(need_bytes(m) for m in here if m.state == "absent")
            busy = any(m.running or m.waiting or m.token_rate for m in here)
            kept_bytes = int(PRESSED_FREE * b.gpu.capacity_bytes) if busy else 0
            b.limit_room(b.gpu.free_bytes - planned_bytes - kept_bytes)
        return found

    def changing(self) -> set[str]:
        """Returns devices on which a model is activated, evicted or moved, now or in this plan."""
        acts = {a.model: a for a in self.actions if not isinstance(a, Refuse)}
        found: set[str] = set()
        for action in acts.values():
            if isinstance(action, Activate):
                found.update((action.device, *action.peers))
            elif isinstance(action, Migrate):
                found.update((action.target, *action.peers))
        for model in self.view.models:
            if model.state not in ("absent", "active") or model.name in acts:
                found.update((*devices_of(model), *model.moving_to))
        return found


def settled(view: ClusterView) -> tuple[list[ModelView], list[GpuView]]:
    """Returns models and devices as they will be after the current evictions.

    Engines and memory of draining models count as free, since an activation waits for evictions on
    its device.
    """
    leaving = [d for m in view.models if m.state == "draining" for d in devices_of(m)]
    if not leaving:
        return list(view.models), list(view.gpus)
    gpus = [
        structs.replace(g, engines_free=g.engines_free + leaving.count(g.name)) for g in view.gpus
    ]
    return [m for m in view.models if m.state != "draining"], gpus


def is_short(b: Bin, settings: Settings) -> bool:
    """Returns True if little of the device's memory is free."""
    return b.gpu.free_bytes < settings.short_fraction * b.gpu.capacity_bytes
