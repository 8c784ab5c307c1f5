"""Moves of the prism policy for balance: Algorithm 1's (Prism §6.2), off devices that are pressed
now, where the room that they take is free now. One at a time: the next interval sees its effect.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from msgspec import structs

from prism.policies import kvpr
from prism.policies.bins import Bin, current_bins, devices_of, need_bytes, part
from prism.policies.builder import PlanBuilder, settled
from prism.policies.data import Migrate, ModelView, beside

PRESSED_FREE = 0.25
"""A device with a smaller part of its memory free may lack it before the next burst is over."""


def movable(b: Bin) -> list[ModelView]:
    here = (m for m in b.models.values() if m.state == "active")
    return [m for m in here if m.pinned_device is None]


def elsewhere(
    builder: PlanBuilder, model: ModelView, avoided: Collection[str] = ()
) -> tuple[Bin, ...] | None:
    """The least pressed devices for all its parts among those that hold none of it and are not
    `avoided`: old and new ranks are there at the same time, and no device has two."""
    now = (*devices_of(model), *avoided)
    rest = {name: b for name, b in builder.bins.items() if name not in now}
    return kvpr.homes(model, rest, kvpr.by_rank, 0.0)


def migrate(builder: PlanBuilder, model: ModelView, home: Sequence[Bin], reason: str) -> None:
    """`model` is active, so that it has a device."""
    assert model.device is not None
    first, *peers = home
    ranks, move = tuple(b.name for b in peers), builder.settings.move_running
    builder.actions.append(
        Migrate(model.name, model.device, first.name, reason, peers=ranks, move_running=move)
    )
    # The source keeps the model until the target serves it: no other model gets its room yet.
    for b in (*home, *_held_by(builder, model)):
        b.put(structs.replace(model, state="migrating"))


def _held_by(builder: PlanBuilder, model: ModelView) -> list[Bin]:
    return [builder.bins[device] for device in devices_of(model) if device in builder.bins]


def rebalance(builder: PlanBuilder) -> None:
    """The first move of Algorithm 1's placement off a contended device that alone lowers the worst
    KVPR of the devices it touches by more than tau; without one, that of a tensor-parallel model to
    the least pressed devices. One in a plan, and none to or from a device where a model comes or
    goes: the next interval sees its effect."""
    models, gpus = settled(builder.view)
    residents = [m for m in models if m.device in builder.bins]
    # An idle model exerts no pressure: moving it would cost an activation and relieve nothing. A
    # model with several copies is spread already.
    several = builder.copies
    busy = [m for m in residents if m.token_rate > 0 and m.name not in several]
    least = builder.settings.contended_requests
    contended = {name for name, b in builder.bins.items() if _contended(b, least)}
    pressed = [m for m in busy if not contended.isdisjoint(devices_of(m))]
    if not pressed:
        return
    free = [m for m in busy if m.tp == 1]
    leaving = {m.name for m in free}
    staying = [m for m in residents if m.name not in leaving]
    tau = builder.settings.migration_threshold
    start = partial(current_bins, residents, gpus, staying)
    placement = kvpr.place(free, gpus, tau, start)
    for model in sorted((m for m in pressed if m.tp == 1), key=kvpr.by_pressure):
        if model.name not in placement.homes:
            continue
        (device,) = placement.homes[model.name]
        target = builder.bins[device]
        if device == model.device or not target.fits(model):
            continue
        if _relieved(builder, model, [target]):
            return
    for model in sorted((m for m in pressed if m.tp > 1), key=kvpr.by_pressure):
        home = elsewhere(builder, part(model))
        if home is not None and _relieved(builder, part(model), home):
            return


def _relieved(builder: PlanBuilder, model: ModelView, home: Sequence[Bin]) -> bool:
    """Plans the move if relief is above tau, no model comes or goes on these devices, and the room
    that it needs is free now: it must not press on requests that run there."""
    sources, tau = _held_by(builder, model), builder.settings.migration_threshold
    free = all(b.gpu.free_bytes >= need_bytes(model) for b in home)
    if model.state != "active" or not free:
        return False
    relief = _relief_of(model, sources, home)
    if relief <= tau or not builder.changing().isdisjoint(b.name for b in (*sources, *home)):
        return False
    names = ", ".join(b.name for b in sources)
    reason = f"lowers the KVPR of {names} by {relief:.0%}, tau is {tau:.0%}"
    migrate(builder, model, home, reason)
    return True


def _contended(b: Bin, least: float) -> bool:
    """Enough requests run beside the busiest model's, and the device is pressed: so many wait, or
    memory may soon be short. Rates are of the past window, and where all that is asked for is
    served with room to spare, a move can only do harm."""
    short = b.gpu.free_bytes < PRESSED_FREE * b.gpu.capacity_bytes
    if not short and sum(m.waiting for m in b.models.values()) < least:
        return False
    return beside([m.token_rate * m.slo_tpot_s for m in b.models.values()]) >= least


def _relief_of(model: ModelView, sources: Sequence[Bin], home: Sequence[Bin]) -> float:
    before = max(b.kvpr for b in (*sources, *home))
    left = max(b.kvpr_without([model.name]) for b in sources)
    return kvpr.gain(before, max(left, *(b.kvpr_with(model) for b in home)))
