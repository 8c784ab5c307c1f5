"""Migrations of the prism policy that balance KV pressure (Prism §6.2, Algorithm 1).

Models leave contended devices only, and move only where enough memory is free now. A plan has at
most one such migration, so that the next interval sees its effect.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from msgspec import structs

from prism.policies import kvpr
from prism.policies.bins import Bin, current_bins, devices_of, need_bytes, part
from prism.policies.data import Migrate, ModelView, Settings, contending
from prism.policies.latency import late_rps
from prism.policies.planning.builder import PRESSED_FREE, PlanBuilder, settled


def movable(b: Bin) -> list[ModelView]:
    here = (m for m in b.models.values() if m.state == "active")
    return [m for m in here if m.pinned_device is None]


def find_target(
    builder: PlanBuilder, model: ModelView, avoided: Collection[str] = ()
) -> tuple[Bin, ...] | None:
    """Returns the least pressed devices that a model can move to, or None.

    Excludes devices that hold a part of the model and those in `avoided`. During a move old and new
    ranks exist at the same time, and a device can hold only one.
    """
    now = (*devices_of(model), *avoided)
    rest = {name: b for name, b in builder.bins.items() if name not in now}
    return kvpr.choose_devices(model, rest)


def migrate(
    builder: PlanBuilder,
    model: ModelView,
    home: Sequence[Bin],
    reason: str,
    there: ModelView | None = None,
) -> None:
    """Adds a migration to the plan. REQUIRES: `model` is active.

    Args:
        there: Its part on each target device, if that differs.
    """
    assert model.device is not None
    first, *peers = home
    ranks, move = tuple(b.name for b in peers), builder.settings.move_running
    builder.actions.append(
        Migrate(model.name, model.device, first.name, reason, peers=ranks, move_running=move)
    )
    # The source keeps the model until the target serves it: its memory is not available yet.
    for b in builder.held_by(model):
        b.put(structs.replace(model, state="migrating"))
    for b in home:
        b.put(structs.replace(there or model, state="migrating"))


def late_rps_of_move(
    builder: PlanBuilder, model: ModelView, there: ModelView, home: Sequence[Bin]
) -> tuple[float, float]:
    """Returns the late requests of all devices involved in a move, before and after it.

    Args:
        there: Part of the model on each of the devices `home`, none of which holds one now.
    """
    held = builder.held_by(model)
    before = sum(b.late_rps for b in (*held, *home))
    after = sum(late_rps([*b.models.values(), there]) for b in home)
    after += sum(b.late_without(model.name) for b in held)
    # Sums over other devices and ranks must compare as equal.
    return round(before, 2), round(after, 2)


def rebalance(builder: PlanBuilder) -> None:
    """Adds at most one migration off a contended device to the plan.

    It is the first move in Algorithm 1's placement that by itself lowers the worst KVPR of the
    devices involved by more than tau. If there is none, tensor-parallel models are tried on the
    least pressed devices. Devices on which a model is activated or evicted are not involved.
    """
    models, gpus = settled(builder.view)
    residents = [m for m in models if m.device in builder.bins]
    # Moving an idle model would cost an activation and relieve no pressure. Models with several
    # copies are distributed already.
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
        if model.name not in placement.devices:
            continue
        (device,) = placement.devices[model.name]
        target = builder.bins[device]
        if device == model.device or not target.fits(model):
            continue
        if _migrate_if_relieving(builder, model, [target]):
            return
    for model in sorted((m for m in pressed if m.tp > 1), key=kvpr.by_pressure):
        home = find_target(builder, part(model))
        if home is not None and _migrate_if_relieving(builder, part(model), home):
            return


def _migrate_if_relieving(builder: PlanBuilder, model: ModelView, home: Sequence[Bin]) -> bool:
    """Adds the migration if it is worth it. Returns True if it was added.

    The relief must be above tau, no more requests may be late, no model may be activated or evicted
    on these devices, and the needed memory must be free now, so that requests running there are not
    affected.
    """
    sources, tau = builder.held_by(model), builder.settings.migration_threshold
    free = all(b.gpu.free_bytes >= need_bytes(model) for b in home)
    if model.state != "active" or not free:
        return False
    relief = _relief_of(model, sources, home) * _lasting_part(model, builder.settings)
    if relief <= tau or not builder.changing().isdisjoint(b.name for b in (*sources, *home)):
        return False
    before, after = late_rps_of_move(builder, model, model, home)
    if after > before:
        return False
    names = ", ".join(b.name for b in sources)
    reason = f"lowers the KVPR of {names} by {relief:.0%}, tau is {tau:.0%}"
    migrate(builder, model, home, reason)
    return True


def _lasting_part(model: ModelView, settings: Settings) -> float:
    """Returns the part of an idle threshold in which a move of the model relieves its device.

    Until it is loaded there, and its running requests have ended here or moved, it takes memory of
    both.
    """
    ending_s = 0.0 if settings.move_running else model.traffic.output_tokens * model.slo_tpot_s
    moving_s = model.load_s + ending_s
    return max(0.0, 1.0 - moving_s / settings.idle_threshold_s)


def _contended(b: Bin, least: float) -> bool:
    """Returns True if models contend for the device, and requests wait or memory may run out.

    Both conditions are needed: rates are of the past window, and where all requests are served with
    memory to spare, a move can only do harm.
    """
    short = b.gpu.free_bytes < PRESSED_FREE * b.gpu.capacity_bytes
    if not short and sum(m.waiting for m in b.models.values()) < least:
        return False
    return contending([m.token_rate * m.slo_tpot_s for m in b.models.values()]) >= least


def _relief_of(model: ModelView, sources: Sequence[Bin], home: Sequence[Bin]) -> float:
    before = max(b.kvpr for b in (*sources, *home))
    left = max(b.kvpr_without([model.name]) for b in sources)
    return kvpr.gain(before, max(left, *(b.kvpr_with(model) for b in home)))
