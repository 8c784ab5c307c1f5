"""Aegaeon (SOSP 2025): many models on few devices by switching models between tokens.

Prompts of one model form groups, so that a switch serves several of them (§4.2, Algorithm 1).
Decoding models take turns. A turn lasts until the batch is as many tokens ahead of its TPOT SLO as
every other batch (§4.3, Algorithm 2). Tokens are computed in bursts and delivered when they are
due, so the paper's attainment counts each token by its own deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from prism.policies.baselines import qlm
from prism.policies.data import Action, ClusterView, Settings
from prism.policies.multiplexing.turns import PrefillQueue, TurnBatch, TurnPolicy
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
    """Returns an empty plan, since models have no placement."""
    return ()


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
