"""Copies of a model for the prism policy: one more while saturated, one less if spare.

In the papers a model has one copy. Here copies share the model's rate evenly, and KVPR uses each
copy's share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from msgspec import structs

from prism.policies import kvpr
from prism.policies.bins import Bin, devices_of, need_bytes, part
from prism.policies.data import Activate, ClusterView, Evict, ModelView, Refuse, Settings
from prism.policies.planning.builder import PlanBuilder

SPARE_FRACTION = 0.5
"""A copy is evicted if the others then serve less than this fraction of a copy's known rate."""

RATE_INTERVAL_S = 0.5
"""Interval of the agents' reports, after which a rate may have changed."""

MakeRoom = Callable[[PlanBuilder, ModelView, Collection[Bin], float], Sequence[Bin] | None]
"""Evicts idle models for a part where the KVPR then stays below a bound. Returns a bin for each
part, or None."""


def queued(view: ClusterView) -> list[ModelView]:
    """Returns the models that may have copies and that have waiting requests."""
    return [m for m in view.models if m.waiting and m.replicas_max > 1]


def saturated(model: ModelView, settings: Settings) -> bool:
    """Returns True if requests arrive faster than this copy serves them.

    Its queue has lasted for longer than the activation of another copy and the TTFT SLO, while it
    serves `contended_requests` at a time. A copy that was active for less time than its load took
    is not saturated, since its queue may consist of requests that arrived meanwhile.
    """
    return saturated_in_s(model, settings) <= 0


def saturated_in_s(model: ModelView, settings: Settings) -> float:
    """Returns the least time until the copy is saturated, if its queue lasts."""
    least = max(1.0, settings.contended_requests)
    if model.state != "active" or model.waiting < least:
        return math.inf
    enough = model.token_rate * model.slo_tpot_s >= least
    lasts_s = max(model.load_s, model.slo_ttft_s)
    return max(lasts_s - model.oldest_wait_s, model.owes_s, 0.0 if enough else RATE_INTERVAL_S)


def has_spare_copy(copies: Sequence[ModelView]) -> bool:
    """Returns True if one of the copies is not needed.

    No copy has a queue, and without one the others serve less than `SPARE_FRACTION` of the rate
    that a copy is known to sustain.
    """
    others = len(copies) - 1
    if others < max(1, copies[0].replicas_min):
        return False
    if any(m.waiting or m.state != "active" or m.owes_s > 0 for m in copies):
        return False
    rate = sum(m.token_rate for m in copies)
    return rate / others < SPARE_FRACTION * copies[0].saturated_rate or rate == 0


def may_adjust(model: ModelView, copies: int, settings: Settings) -> bool:
    """Returns True if `adjust` may act on a model with `copies` copies, now or soon."""
    if model.state == "active" and copies < model.replicas_min:
        return True
    soon = saturated_in_s(model, settings) < math.inf
    return copies > 1 or (copies < model.replicas_max and soon)


def adjust(builder: PlanBuilder, make_room: MakeRoom) -> None:
    """Adds or removes at most one copy of each model.

    Skips models with an action in progress. Removes copies only once per scheduling interval, since
    a pause between requests is not a reason.
    """
    several, scarce = builder.copies, _is_scarce(builder)
    for name, copies in several.items():
        if builder.view.rebalance and has_spare_copy(copies) and not builder.is_changing(name):
            _drop(builder, copies)
    if scarce:
        return  # memory is reserved for models without any copy
    # An early filter, since most models need no copy.
    asking = {m.name for m in queued(builder.view)}
    models = (m for m in builder.view.models if m.name in asking or m.replicas_min > 1)
    for model in sorted(models, key=lambda m: -m.waiting):
        copies = several.get(model.name, [model])
        if model is copies[0] and _needs_copy(builder, copies):
            _add(builder, copies, make_room)


def surplus_copies(builder: PlanBuilder) -> list[ModelView]:
    """Returns copies that may be evicted for models without any copy, least busy first.

    Of each model it leaves one copy, or `replicas_min`. It excludes copies that have been active
    for less time than their load took.
    """
    found: list[ModelView] = []
    for name, copies in builder.copies.items():
        if builder.is_changing(name):
            continue
        ready = sorted((m for m in copies if m.owes_s <= 0), key=lambda m: (m.running, m.device))
        found += ready[: len(copies) - max(1, copies[0].replicas_min)]
    return sorted(found, key=lambda m: m.waiting + m.running)


def _is_scarce(builder: PlanBuilder) -> bool:
    """Returns True if this plan evicts a model, or refuses one that could fit on the devices.

    A refused model that is too large for them would not benefit from fewer copies.
    """
    if any(isinstance(action, Evict) for action in builder.actions):
        return True
    refused = {action.model for action in builder.actions if isinstance(action, Refuse)}
    return bool(builder.fitting_alone(m for m in builder.view.models if m.name in refused))


def _needs_copy(builder: PlanBuilder, copies: Sequence[ModelView]) -> bool:
    first = copies[0]
    settled = all(m.state == "active" and m.owes_s <= 0 for m in copies)
    if not settled or len(copies) >= first.replicas_max or first.pinned_device is not None:
        return False
    if builder.is_changing(first.name):
        return False
    return len(copies) < first.replicas_min or any(
        saturated(m, builder.settings) and _has_longest_queue(builder, m) for m in copies
    )


def _has_longest_queue(builder: PlanBuilder, model: ModelView) -> bool:
    """Returns True if no other model on its devices has more waiting requests."""
    held = (builder.bins[d] for d in devices_of(model) if d in builder.bins)
    return all(other.waiting <= model.waiting for b in held for other in b.models.values())


def _drop(builder: PlanBuilder, copies: Sequence[ModelView]) -> None:
    """Evicts the copy without which the worst KVPR of the model's devices is least."""

    def rank(leaving: ModelView) -> tuple[float, int, str]:
        homes = [(m, b) for m in copies for b in builder.held_by(m)]
        left = [b.kvpr_without([m.name]) for m, b in homes if m is leaving]
        share = [b.kvpr_with(_part(copies, len(copies) - 1)) for m, b in homes if m is not leaving]
        return max([*left, *share], default=0.0), leaving.running, leaving.device or ""

    leaving = min(copies, key=rank)
    assert leaving.device is not None
    reason = f"{len(copies) - 1} of {len(copies)} copies are enough"
    builder.actions.append(Evict(leaving.name, leaving.device, reason, move_running=True))
    for b in builder.held_by(leaving):
        b.take(leaving.name)
    _share(builder, [m for m in copies if m is not leaving], len(copies) - 1)


def _add(builder: PlanBuilder, copies: Sequence[ModelView], make_room: MakeRoom) -> None:
    """Activates another copy on the least pressed devices with enough free memory.

    If there are none, evicts idle models on devices with less KVPR than the model's own. Free
    devices are used at any KVPR: it measures memory only, and where no requests wait, a copy does
    no harm.
    """
    candidate = _part(copies, len(copies) + 1)
    wanted = len(copies) < copies[0].replicas_min
    worst = max((b.kvpr for m in copies for b in builder.held_by(m)), default=math.inf)
    unqueued = [b for b in builder.bins.values() if wanted or not _has_queue(builder, b)]
    need = need_bytes(candidate)
    free = {b.name: b for b in unqueued if b.gpu.free_bytes >= need}
    home: Sequence[Bin] | None = kvpr.choose_devices(candidate, free)
    if home is None:
        home = make_room(builder, candidate, unqueued, math.inf if wanted else worst)
    if home is None:
        return
    waits = max(m.oldest_wait_s for m in copies)
    why = "replicas.min" if wanted else f"saturated, requests have waited for {waits:.1f} s"
    reason = f"{why}; copy {len(copies) + 1} (KVPR {home[0].kvpr:.3g})"
    ranks = tuple(b.name for b in home[1:])
    builder.actions.append(Activate(candidate.name, home[0].name, reason, peers=ranks, joins=True))
    for b in home:
        b.put(candidate)
    _share(builder, copies, len(copies) + 1)


def _has_queue(builder: PlanBuilder, b: Bin) -> bool:
    """Returns True if requests wait on the device, which a copy there would delay."""
    waiting = sum(m.waiting for m in b.models.values())
    return waiting >= max(1.0, builder.settings.contended_requests)


def _part(copies: Sequence[ModelView], count: int) -> ModelView:
    """Returns the part of one of `count` copies on each of its devices, not placed yet."""
    rate = sum(m.token_rate for m in copies) / count
    return part(structs.replace(copies[0], token_rate=rate, device=None, peers=(), state="absent"))


def _share(builder: PlanBuilder, copies: Sequence[ModelView], count: int) -> None:
    """Updates the bins with each copy's new share of the rate."""
    rate = sum(m.token_rate for m in copies) / count
    for model in copies:
        for b in builder.held_by(model):
            b.put(part(structs.replace(model, token_rate=rate)))
