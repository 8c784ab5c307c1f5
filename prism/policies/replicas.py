"""Copies of a model for the prism policy: one more where a device of the model stays saturated, one
less where the others can do the work.

The papers give a model one place. Copies share its rate evenly, so KVPR sees each with its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from msgspec import structs

from prism.policies import kvpr
from prism.policies.bins import Bin, devices_of, need_bytes, part
from prism.policies.builder import PlanBuilder
from prism.policies.data import Activate, ClusterView, Evict, ModelView, Refuse, Settings

SPARE_PART = 0.5
"""A copy leaves where the others then serve less than this part of what a copy can."""

RATE_LOOK_S = 0.5
"""A rate may have grown in so long: agents report as often."""

MakeRoom = Callable[[PlanBuilder, ModelView, Collection[Bin], float], Sequence[Bin] | None]
"""Evicts what the part may displace on some of these, where their KVPR then stays below a bound; a
bin for each part, or None."""


def queued(view: ClusterView) -> list[ModelView]:
    """Those that may be saturated, and may have copies."""
    return [m for m in view.models if m.waiting and m.replicas_max > 1]


def saturated(model: ModelView, settings: Settings) -> bool:
    """Requests come faster than this copy serves them: a queue has lasted for longer than another
    copy takes to come up, and than the SLO allows, while it serves as many as run at a time in
    contention. Not before it has been up for as long as it took to load: until then the queue may
    be what came meanwhile."""
    return saturated_in_s(model, settings) <= 0


def saturated_in_s(model: ModelView, settings: Settings) -> float:
    """Until it is saturated at the earliest, if its queue lasts."""
    least = max(1.0, settings.contended_requests)
    if model.state != "active" or model.waiting < least:
        return math.inf
    enough = model.token_rate * model.slo_tpot_s >= least
    lasts_s = max(model.load_s, model.slo_ttft_s)
    return max(lasts_s - model.oldest_wait_s, model.owes_s, 0.0 if enough else RATE_LOOK_S)


def spare(copies: Sequence[ModelView]) -> bool:
    """One of the copies is not needed: none has a queue, and without one the others serve less than
    `SPARE_PART` of what a copy is known to serve."""
    others = len(copies) - 1
    if others < max(1, copies[0].replicas_min):
        return False
    if any(m.waiting or m.state != "active" or m.owes_s > 0 for m in copies):
        return False
    rate = sum(m.token_rate for m in copies)
    return rate / others < SPARE_PART * copies[0].saturated_rate or rate == 0


def to_adjust(model: ModelView, copies: int, settings: Settings) -> bool:
    """Whether `adjust` may have something to do for a model with so many copies, now or soon."""
    if model.state == "active" and copies < model.replicas_min:
        return True
    soon = saturated_in_s(model, settings) < math.inf
    return copies > 1 or (copies < model.replicas_max and soon)


def adjust(builder: PlanBuilder, make_room: MakeRoom) -> None:
    """At most one copy of a model more or less; none while one comes, goes or moves. Less only
    where the scheduling interval has passed: a pause between requests is no reason."""
    several, scarce = builder.copies, _is_scarce(builder)
    for name, copies in several.items():
        if builder.view.rebalance and spare(copies) and not builder.is_changing(name):
            _drop(builder, copies)
    if scarce:
        return  # memory is for models without any copy
    # Most models ask for nothing.
    asking = {m.name for m in queued(builder.view)}
    models = (m for m in builder.view.models if m.name in asking or m.replicas_min > 1)
    for model in sorted(models, key=lambda m: (-m.waiting, m.name)):
        copies = several.get(model.name, [model])
        if model is copies[0] and _wants_more(builder, copies):
            _add(builder, copies, make_room)


def beyond_first(builder: PlanBuilder) -> list[ModelView]:
    """Copies that make way for models without any, those with least to do first: of each model all
    but one, or `replicas_min`, that have been up for as long as they took to load."""
    found: list[ModelView] = []
    for name, copies in builder.copies.items():
        if builder.is_changing(name):
            continue
        ready = sorted((m for m in copies if m.owes_s <= 0), key=lambda m: (m.running, m.device))
        found += ready[: len(copies) - max(1, copies[0].replicas_min)]
    return sorted(found, key=lambda m: (m.waiting + m.running, m.name, m.device))


def _is_scarce(builder: PlanBuilder) -> bool:
    """A model had to make way, or one lacks memory that the devices could give: one that is too
    large for them gains nothing by what copies leave."""
    if any(isinstance(action, Evict) for action in builder.actions):
        return True
    refused = {action.model for action in builder.actions if isinstance(action, Refuse)}
    return any(_could_fit(builder, part(m)) for m in builder.view.models if m.name in refused)


def _could_fit(builder: PlanBuilder, model: ModelView) -> bool:
    """On devices without any other model."""
    empty = (Bin(b.gpu, b.engines) for b in builder.bins.values())
    return sum(b.fits(model) for b in empty) >= model.tp


def _wants_more(builder: PlanBuilder, copies: Sequence[ModelView]) -> bool:
    first = copies[0]
    settled = all(m.state == "active" and m.owes_s <= 0 for m in copies)
    if not settled or len(copies) >= first.replicas_max or first.pinned_device is not None:
        return False
    if builder.is_changing(first.name):
        return False
    return len(copies) < first.replicas_min or any(
        saturated(m, builder.settings) and _leads(builder, m) for m in copies
    )


def _leads(builder: PlanBuilder, model: ModelView) -> bool:
    """No other model on its devices has more requests waiting: the others wait for it."""
    held = (builder.bins[d] for d in devices_of(model) if d in builder.bins)
    return all(other.waiting <= model.waiting for b in held for other in b.models.values())


def _drop(builder: PlanBuilder, copies: Sequence[ModelView]) -> None:
    """The copy without which the worst KVPR of the model's devices is least."""

    def rank(leaving: ModelView) -> tuple[float, int, str]:
        homes = [(m, b) for m in copies for b in _held_by(builder, m)]
        left = [b.kvpr_without([m.name]) for m, b in homes if m is leaving]
        share = [b.kvpr_with(_part(copies, len(copies) - 1)) for m, b in homes if m is not leaving]
        return max([*left, *share], default=0.0), leaving.running, leaving.device or ""

    leaving = min(copies, key=rank)
    assert leaving.device is not None
    reason = f"{len(copies) - 1} of {len(copies)} copies can do the work"
    builder.actions.append(Evict(leaving.name, leaving.device, reason, move_running=True))
    for b in _held_by(builder, leaving):
        b.take(leaving.name)
    _share(builder, [m for m in copies if m is not leaving], len(copies) - 1)


def _add(builder: PlanBuilder, copies: Sequence[ModelView], make_room: MakeRoom) -> None:
    """Where pressure is least, with room that is free now; or with room that idle models leave, if
    pressure is less there. KVPR is about memory, and a copy that lacks compute may be less pressed
    than any device with room: where that is free and nobody waits, nobody loses by a copy."""
    candidate = _part(copies, len(copies) + 1)
    wanted = len(copies) < copies[0].replicas_min
    worst = max((b.kvpr for m in copies for b in _held_by(builder, m)), default=math.inf)
    quiet = [b for b in builder.bins.values() if wanted or _is_quiet(builder, b)]
    need = need_bytes(candidate)
    free = {b.name: b for b in quiet if b.gpu.free_bytes >= need}
    home: Sequence[Bin] | None = kvpr.homes(candidate, free, kvpr.by_rank, 0.0)
    if home is None:
        home = make_room(builder, candidate, quiet, math.inf if wanted else worst)
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


def _is_quiet(builder: PlanBuilder, b: Bin) -> bool:
    """What waits there would wait longer."""
    waiting = sum(m.waiting for m in b.models.values())
    return waiting < max(1.0, builder.settings.contended_requests)


def _part(copies: Sequence[ModelView], count: int) -> ModelView:
    """What each device of one of `count` copies holds, without a place."""
    rate = sum(m.token_rate for m in copies) / count
    return part(structs.replace(copies[0], token_rate=rate, device=None, peers=(), state="absent"))


def _share(builder: PlanBuilder, copies: Sequence[ModelView], count: int) -> None:
    """The copies that stay carry another share of the rate."""
    rate = sum(m.token_rate for m in copies) / count
    for model in copies:
        for b in _held_by(builder, model):
            b.put(part(structs.replace(model, token_rate=rate)))


def _held_by(builder: PlanBuilder, model: ModelView) -> list[Bin]:
    return [builder.bins[device] for device in devices_of(model) if device in builder.bins]
