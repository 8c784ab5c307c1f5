"""Models that have to leave where they are: their device is drained, or they are pinned elsewhere.

Nothing is placed on a drained device (`GpuView.alive`). What is there moves, or is evicted once it
has no requests; no request is given up for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prism.policies.balance import elsewhere, migrate
from prism.policies.bins import devices_of, part
from prism.policies.builder import PlanBuilder
from prism.policies.data import Action, ClusterView, Evict, ModelView, Refuse


def must_leave(view: ClusterView) -> list[ModelView]:
    """Active ones; those first that have requests, since they need a place elsewhere."""
    drained = _drained(view)
    # Most plans are made where nothing has to leave.
    some = view.models if drained else [m for m in view.models if m.pinned_device is not None]
    found = (m for m in some if m.state == "active" and _is_misplaced(m, drained))
    return sorted(found, key=_urgency)


def _is_misplaced(model: ModelView, drained: frozenset[str]) -> bool:
    return _is_pinned_elsewhere(model) or _is_on(model, drained)


def _drained(view: ClusterView) -> frozenset[str]:
    return frozenset(gpu.name for gpu in view.gpus if gpu.drained)


def _is_on(model: ModelView, drained: frozenset[str]) -> bool:
    return not drained.isdisjoint(devices_of(model))


def _is_pinned_elsewhere(model: ModelView) -> bool:
    """A pin is for a model on one device."""
    return model.pinned_device is not None and model.tp == 1 and model.device != model.pinned_device


def _urgency(model: ModelView) -> tuple[bool, str, str]:
    return (not (_is_busy(model) or model.never_evict), model.name, model.device or "")


def _is_busy(model: ModelView) -> bool:
    return model.running > 0 or model.waiting > 0


def evictions(view: ClusterView, planned: Sequence[Action]) -> list[Action]:
    """Of idle models on drained devices, beside the plan of a policy that knows of none. Pins are
    the policy's own concern."""
    if not (drained := _drained(view)):
        return []
    acting = {action.model for action in planned if not isinstance(action, Refuse)}
    found: list[Action] = []
    for model in view.models:
        stays = model.state != "active" or _is_busy(model) or model.never_evict
        if stays or model.name in acting or not _is_on(model, drained):
            continue
        assert model.device is not None
        acting.add(model.name)
        found.append(Evict(model.name, model.device, _reason(model, drained)))
    return found


def vacate(
    builder: PlanBuilder,
    leaving: Sequence[ModelView],
    make_room: Callable[[PlanBuilder, ModelView], bool],
    evict: Callable[[PlanBuilder, ModelView, str], None],
) -> None:
    """Moves and evictions of these. Nothing moves to where models come or go: the next plan sees
    what came of it.

    make_room: plans evictions of idle models, if the part then fits elsewhere; whether it does.
    """
    drained = _drained(builder.view)
    for model in leaving:
        if builder.is_changing(model.name):
            continue
        reason = _reason(model, drained)
        staying = _staying_copies(builder, model, leaving)
        needs_room = _is_busy(model) or model.never_evict
        if staying >= max(1, model.replicas_min):
            evict(builder, model, f"{reason}; other copies serve it")
        elif home := elsewhere(builder, part(model), builder.changing()):
            migrate(builder, part(model), home, reason)
        elif elsewhere(builder, part(model)) or (needs_room and make_room(builder, part(model))):
            continue  # until what comes or goes there has done so
        elif staying or not needs_room:  # a copy less than `replicas.min`, but one
            evict(builder, model, f"{reason}; no other device can take it now")


def _staying_copies(builder: PlanBuilder, model: ModelView, leaving: Sequence[ModelView]) -> int:
    return sum(copy not in leaving for copy in builder.copies.get(model.name, ()))


def _reason(model: ModelView, drained: frozenset[str]) -> str:
    if _is_pinned_elsewhere(model):
        return f"pinned to {model.pinned_device}"
    return f"{', '.join(filter(drained.__contains__, devices_of(model)))} is drained"


def remaining(view: ClusterView, device: str, moves: bool) -> dict[str, str]:
    """For people: model -> why it is still on the device. moves: the policy moves models off it."""
    return {m.name: _why(m, device, moves) for m in view.models if device in devices_of(m)}


def _why(model: ModelView, device: str, moves: bool) -> str:
    if model.state == "migrating":
        return f"moves to {', '.join(model.moving_to)}"
    if model.state != "active":
        return "leaves" if model.state == "draining" else "is coming up"
    if not (_is_busy(model) or model.never_evict):
        return "is about to leave"
    has = "must stay up (never_evict or replicas.min)" if model.never_evict else "has requests"
    if moves and model.pinned_device != device:
        return f"{has}; it moves when another device has room"
    if model.never_evict:
        return f"{has}, and cannot move; change its configuration, then prism-serve reload"
    return f"{has}; it leaves when it is idle"
