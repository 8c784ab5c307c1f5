"""Aegaeon (SOSP 2025): many models on few devices by switching models between tokens.

Prompts of one model form groups, so that a switch serves several of them (§4.2, Algorithm 1).
Decoding models take turns; a turn lasts until the batch is as many tokens ahead of its TPOT SLO as
every other batch (§4.3, Algorithm 2). A reader sees a token when it is due, although it was
computed in a burst before: so the paper's attainment counts tokens by their own deadlines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from prism.policies.data import Action, ClusterView, Settings
from prism.policies.turns import PrefillQueue, TurnBatch, TurnPolicy

ALPHA_MIN = 0.5
"""Below it turns grow longer instead: a round with time to spare is not cut into more switches."""


@dataclass(frozen=True, slots=True)
class AegaeonSettings:
    """The defaults are the paper's: 6 of its 16 devices prefill."""

    prefill_part: float = 0.375
    # MAX_GPSIZE: the most requests of a group, or those of other models would starve.
    group_requests_max: int = 8
    # QMAX: the longest turn.
    quota_max_s: float = 4.0


SHIPPED = AegaeonSettings()


def plan(view: ClusterView, settings: Settings) -> tuple[Action, ...]:
    """No model has a place that a cluster scheduler could choose."""
    return ()


def turns(settings: AegaeonSettings = SHIPPED) -> TurnPolicy:
    """What `Policy.turns` takes."""
    return TurnPolicy(
        settings.prefill_part,
        partial(prefill_on, settings=settings),
        decode_on,
        partial(quotas_s, quota_max_s=settings.quota_max_s),
    )


def prefill_on(
    model: str, queues: Sequence[PrefillQueue], settings: AegaeonSettings = SHIPPED
) -> tuple[int, int | None]:
    """Algorithm 1: the first group of the model that is not full, else a new group where the least
    is to be done."""
    for number, queue in enumerate(queues):
        for place, group in enumerate(queue.groups):
            if group.model == model and group.size < settings.group_requests_max:
                return number, place
    return min(range(len(queues)), key=lambda number: queues[number].load_s), None


def decode_on(model: str, models: Sequence[Sequence[str]]) -> int:
    """Algorithm 2: where the model has a batch already, else where the fewest have one."""
    for number, names in enumerate(models):
        if model in names:
            return number
    return min(range(len(models)), key=lambda number: len(models[number]))


def quotas_s(batches: Sequence[TurnBatch], quota_max_s: float = 4.0) -> tuple[float, ...]:
    """Equations 2 and 3. Batch k decodes n_k = SLO / step times as fast as it must, so a turn of
    q_k is worth q_k x n_k of its readers' time. That is the same for all, and 1 / alpha of the
    round, which takes all turns and all switches c:

        q_k = c / (n_k (alpha - sum 1/n)),  alpha = max(c / (min n x QMAX) + sum 1/n, 0.5)
    """
    if not batches:
        return ()
    ahead = [batch.slo_tpot_s / batch.step_s for batch in batches]
    most_s = quota_max_s * min(ahead)  # of readers' time, so that no turn is above QMAX
    switches_s = sum(batch.switch_s for batch in batches)
    if len(batches) == 1 or switches_s <= 0:
        return tuple(most_s / n for n in ahead)
    busy = sum(1 / n for n in ahead)
    alpha = max(switches_s / most_s + busy, ALPHA_MIN)
    return tuple(switches_s / (n * (alpha - busy)) for n in ahead)
