"""Aegaeon (SOSP 2025): many models on few devices by switching models between tokens.

Prompts of one model form groups, so that a switch serves several of them (§4.2, Algorithm 1).
Decoding models take turns. A turn lasts until the batch is as many tokens ahead of its TPOT SLO as
every other batch (§4.3, Algorithm 2). Tokens are computed in bursts and delivered when they are
due, so the paper's attainment counts each token by its own deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from prism.policies.baselines import qlm
from prism.policies.bins import devices_of, need_bytes, part
from prism.policies.data import (
    Action,
    Activate,
    ClusterView,
    Evict,
    GpuView,
    ModelView,
    Refuse,
    Settings,
)
from prism.policies.multiplexing.turns import InstanceTurn, PrefillQueue, TurnBatch, TurnPolicy
from prism.policies.placement import Hosted, ModelSpecView, Placement, Problem, Unit
from prism.policies.policy import TOKEN_TURNS, Policy, always_balanced

ALPHA_MIN = 0.5
"""Lower bound of alpha. With time to spare, turns grow longer instead of switching more often."""


@dataclass(frozen=True, slots=True)
class AegaeonSettings:
    """Parameters with the paper's defaults."""

    prefill_part: float = 0.375  # 6 of 16 devices
    # MAX_GPSIZE: largest number of requests in a group, so that other models do not starve.
    group_requests_max: int = 8
    # QMAX: longest turn.
    quota_max_s: float = 4.0


SHIPPED = AegaeonSettings()


def plan(view: ClusterView, settings: Settings) -> tuple[Action, ...]:
    """Activates on each instance the model whose turn it is and, where memory and an engine are
    free, the following one. Evicts all others, whose requests go to host memory.

    `settings` is not used.
    """
    here: dict[str, list[ModelView]] = {}
    for model in view.models:
        for device in devices_of(model):
            here.setdefault(device, []).append(model)
    refusals = _refusals(view)
    actions: list[Action] = []
    for turn in view.turns:
        present = {m.name: m for device in turn.devices for m in here.get(device, ())}
        is_refused = turn.model in refusals
        given = replace(turn, model=None, following=None) if is_refused else turn
        actions.extend(_switch(given, view, present))
    return (*actions, *refusals.values())


def _switch(
    turn: InstanceTurn, view: ClusterView, present: Mapping[str, ModelView]
) -> list[Action]:
    """Returns the actions on one instance, which has the models of `present`.

    The following model comes once the first serves. It leaves again if the first needs its memory
    or its engine.
    """
    gpus = [gpu for gpu in view.gpus if gpu.name in turn.devices]
    if not all(gpu.alive for gpu in gpus):
        return []
    device, peers = turn.devices[0], turn.devices[1:]
    able = {m.name: m for m in view.models if device not in m.barred}
    states = {name: m.state for name, m in present.items()}
    first = None if turn.model in present else able.get(turn.model or "")
    free_bytes = min(gpu.free_bytes for gpu in gpus)
    fits = _has_room(first, gpus) if first is not None else free_bytes >= turn.growth_bytes
    kept = {turn.model, turn.following if fits else None}
    leaving = [m for m in present.values() if m.name not in kept]
    why = f"a turn of {turn.model or 'no model'}"
    why += f" of {turn.quota_s:.2f} s" if turn.quota_s else ""
    actions: list[Action] = [
        Evict(m.name, devices_of(m)[0], why, move_running=True)
        for m in leaving
        if m.state == "active"
    ]
    all_leave = bool(leaving) and len(actions) == len(leaving)
    if first is not None and (all_leave or all(gpu.engines_free > 0 for gpu in gpus)):
        actions.append(Activate(first.name, device, why, peers=peers))
    second = None if turn.following in present else able.get(turn.following or "")
    serves = turn.model is not None and states.get(turn.model) == "active"
    if serves and second is not None and _has_room(second, gpus, 2 * turn.growth_bytes):
        actions.append(Activate(second.name, device, "the next turn", peers=peers))
    return actions


def _has_room(model: ModelView, gpus: Iterable[GpuView], more_bytes: int = 0) -> bool:
    """Returns whether each device has an engine and memory for its part of the model."""
    need = need_bytes(part(model)) + more_bytes
    return all(gpu.engines_free > 0 and gpu.free_bytes >= need for gpu in gpus)


def _refusals(view: ClusterView) -> dict[str, Refuse]:
    """Returns refusals of models with requests that no instance can prefill, or none decode."""
    target = view.target or Placement(())
    serves = {u.devices: frozenset(h.model for h in u.models) for u in target.units}
    found: dict[str, Refuse] = {}
    for model in view.models:
        roles = {
            turn.prefills
            for turn in view.turns
            if model.name in serves.get(turn.devices, ()) and turn.devices[0] not in model.barred
        }
        if view.unbound.get(model.name) and len(roles) < 2:
            why = target.refused.get(model.name, "too few instances can hold it")
            found[model.name] = Refuse(model.name, why)
    return found


def search(problem: Problem) -> Placement:
    """Divides the devices into instances of the TP degrees that the models have, by computation.

    A model takes turns on the instances of its degree, of which at least two are needed.
    """
    classes: dict[int, list[ModelSpecView]] = {}
    for model in problem.models:
        classes.setdefault(model.tp, []).append(model)
    number = {device.name: i for i, device in enumerate(problem.devices)}
    found = sorted(qlm.instances(classes, problem, least=2), key=lambda names: number[names[0]])
    units = tuple(
        Unit(names, tuple(Hosted(m.name) for m in classes[len(names)])) for names in found
    )
    lost = classes.keys() - {unit.tp for unit in units}
    refused = {
        m.name: f"no two groups of {tp} devices of one node are left"
        for tp in lost
        for m in classes[tp]
    }
    return Placement(units, refused)


def turns(settings: AegaeonSettings = SHIPPED) -> TurnPolicy:
    """Returns the value of `Policy.turns`."""
    return TurnPolicy(
        settings.prefill_part,
        partial(prefill_on, settings=settings),
        decode_on,
        partial(quotas_s, quota_max_s=settings.quota_max_s),
    )


def prefill_on(
    model: str, queues: Sequence[PrefillQueue], settings: AegaeonSettings = SHIPPED
) -> tuple[int, int | None]:
    """Returns the queue and group of a request (Algorithm 1).

    It is the model's first group that is not full, else a new group in the queue with least load.
    """
    for number, queue in enumerate(queues):
        for position, group in enumerate(queue.groups):
            if group.model == model and group.size < settings.group_requests_max:
                return number, position
    return min(range(len(queues)), key=lambda number: queues[number].load_s), None


def decode_on(model: str, models: Sequence[Sequence[str]]) -> int:
    """Returns the device that has a batch of the model, else the one with fewest (Algorithm 2)."""
    for number, names in enumerate(models):
        if model in names:
            return number
    return min(range(len(models)), key=lambda number: len(models[number]))


def quotas_s(batches: Sequence[TurnBatch], quota_max_s: float = 4.0) -> tuple[float, ...]:
    """Returns the length of each batch's turn (equations 2 and 3).

    Batch k decodes n_k = SLO / step times as fast as required, so a turn of q_k covers q_k x n_k of
    delivery time. This is equal for all batches, and 1 / alpha of the round, which consists of all
    turns and all switches c:

        q_k = c / (n_k (alpha - sum 1/n)),  alpha = max(c / (min n x QMAX) + sum 1/n, 0.5)
    """
    if not batches:
        return ()
    ahead = [batch.slo_tpot_s / batch.step_s for batch in batches]
    most_s = quota_max_s * min(ahead)  # delivery time, so that no turn exceeds QMAX
    switches_s = sum(batch.switch_s for batch in batches)
    if len(batches) == 1 or switches_s <= 0:
        return tuple(most_s / n for n in ahead)
    busy = sum(1 / n for n in ahead)
    alpha = max(switches_s / most_s + busy, ALPHA_MIN)
    return tuple(switches_s / (n * (alpha - busy)) for n in ahead)


POLICY = Policy(
    "aegaeon",
    plan,
    frozenset({TOKEN_TURNS}),
    is_balanced=always_balanced,
    search=search,
    turns=turns(),
)
