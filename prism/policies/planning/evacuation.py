"""Models that must leave their device: it is drained, or they are pinned to another one.

No model is placed on a drained device (`GpuView.alive`). Models on it move, or are evicted once
they have no requests; no request is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prism.policies.bins import devices_of, part
from prism.policies.data import Action, ClusterView, Evict, ModelView, Refuse
from prism.policies.planning.balance import find_target, migrate
from prism.policies.planning.builder import PlanBuilder


def must_leave(view: ClusterView) -> list[ModelView]:
    """Returns active models that must leave, those that need another device first."""
    drained = _drained(view)
    # An early filter, since usually no model has to leave.
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
    """Returns True if the model is pinned to another device. Pins apply to tp 1 only."""
    return model.pinned_device is not None and model.tp == 1 and model.device != model.pinned_device


def _urgency(model: ModelView) -> bool:
    return not (_is_busy(model) or model.never_evict)


def _is_busy(model: ModelView) -> bool:
    return model.running > 0 or model.waiting > 0


def evictions(view: ClusterView, planned: Sequence[Action]) -> list[Action]:
    """Returns evictions of idle models from drained devices.

    For policies without `Policy.drains`, in addition to their plan `planned`. Such policies handle
    pins themselves.
    """
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
    """Adds migrations and evictions of models that must leave.

    No model moves to a device that other actions are changing; a later plan does that.

    Args:
        make_room: Plans evictions of idle models, if the part then fits elsewhere. Returns True if
            it does.
        evict: Plans the eviction of a model, with a reason.
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
        elif home := find_target(builder, part(model), builder.changing()):
            migrate(builder, part(model), home, reason)
        elif find_target(builder, part(model)) or (needs_room and make_room(builder, part(model))):
            continue  # until the current actions on the target are done
        elif staying or not needs_room:  # may leave fewer copies than `replicas.min`, but one
            evict(builder, model, f"{reason}; no other device can take it now")


def _staying_copies(builder: PlanBuilder, model: ModelView, leaving: Sequence[ModelView]) -> int:
    return sum(copy not in leaving for copy in builder.copies.get(model.name, ()))


def _reason(model: ModelView, drained: frozenset[str]) -> str:
    if _is_pinned_elsewhere(model):
        return f"pinned to {model.pinned_device}"
    return f"{', '.join(filter(drained.__contains__, devices_of(model)))} is drained"


def remaining(view: ClusterView, device: str, moves: bool) -> dict[str, str]:
    """Returns model -> why it is still on a drained device, as text for operators.

    Args:
        moves: True if the policy moves models off drained devices.
    """
    return {m.name: _why(m, device, moves) for m in view.models if device in devices_of(m)}


def _why(model: ModelView, device: str, moves: bool) -> str:
    if model.state == "migrating":
        return f"moves to {', '.join(model.moving_to)}"
    if model.state != "active":
        return "is being evicted" if model.state == "draining" else "is being activated"
    if not (_is_busy(model) or model.never_evict):
        return "is about to be evicted"
    has = "must stay up (never_evict or replicas.min)" if model.never_evict else "has requests"
    if moves and model.pinned_device != device:
        return f"{has}; it moves when another device has room"
    if model.never_evict:
        return f"{has}, and cannot move; change its configuration, then run prism-serve reload"
    return f"{has}; it is evicted when it is idle"
