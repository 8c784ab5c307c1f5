"""Turns of models on the instances of token-level switching (Aegaeon §4.2, §4.3).

The live cluster scheduler and the simulator run the same code. Their adapters execute the turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from prism.policies.multiplexing.turns import PrefillGroup, PrefillQueue, TurnBatch

T = TypeVar("T")


@dataclass(slots=True)
class PromptGroup(Generic[T]):
    """Prompts of one model."""

    model: str
    # Time of the switch from the previous group's model; 0 once the switch has begun.
    switch_s: float
    # Prefill time of the waiting prompts.
    prompts_s: float = 0.0
    waiting: deque[T] = field(default_factory=deque)
    # Number of prompts that ever joined.
    size: int = 0


class PrefillTurns(Generic[T]):
    """Groups of prompts that a prefill instance processes in order."""

    def __init__(self) -> None:
        self.groups: deque[PromptGroup[T]] = deque()
        # Of the groups, since a view is made for each prompt.
        self._views: deque[PrefillGroup] = deque()

    def view(self, left_s: float) -> PrefillQueue:
        """Returns the queue. left_s: Rest of the switch or prefill in progress."""
        load_s = left_s + sum([group.switch_s + group.prompts_s for group in self.groups])
        return PrefillQueue(tuple(self._views), load_s)

    def end_group(self) -> None:
        """Removes the first group."""
        self.groups.popleft()
        self._views.popleft()

    def add(
        self,
        prompt: T,
        model: str,
        place: int | None,
        *,
        prompt_s: float,
        switch_s: float,
        resident: str | None,
    ) -> None:
        """Adds a prompt to the group at index `place`, or to a new one if it is None.

        Args:
            prompt_s: its prefill time.
            switch_s: time of a switch to its model.
            resident: model of the instance, which counts if its queue is empty.
        """
        if place is None:
            last = self.groups[-1].model if self.groups else resident
            self.groups.append(PromptGroup(model, 0.0 if model == last else switch_s))
            self._views.append(PrefillGroup(model, 0))
            place = -1
        group = self.groups[place]
        group.waiting.append(prompt)
        group.prompts_s += prompt_s
        group.size += 1
        self._views[place] = PrefillGroup(model, group.size)

    @property
    def following(self) -> str | None:
        """Model of the next switch, or None."""
        models = (group.model for group in self.groups)
        return next((model for model in models if model != self.groups[0].model), None)


class DecodeTurns:
    """Rounds of a decode instance. Each model with requests has one turn in a round."""

    def __init__(self, quotas_s: Callable[[Sequence[TurnBatch]], tuple[float, ...]]) -> None:
        self._quotas_s = quotas_s
        # Models and lengths of the turns that are left in the round.
        self._order: deque[tuple[str, float]] = deque()

    def next(
        self, models: Collection[str], batches: Callable[[], Sequence[TurnBatch]]
    ) -> tuple[str, float] | None:
        """Returns the next turn as (model, its length in seconds), or None without requests.

        Args:
            models: those with requests.
            batches: Returns their requests, for a new round.
        """
        while models:
            while self._order:
                turn = self._order.popleft()
                if turn[0] in models:
                    return turn
            found = batches()
            names = (batch.model for batch in found)
            self._order.extend(zip(names, self._quotas_s(found), strict=True))
        return None

    def following(self, model: str, models: Collection[str]) -> str | None:
        """Returns the model of the next switch, or None.

        Args:
            model: that of the present turn.
            models: those with requests, in the order of a round.
        """
        coming = (*(name for name, _ in self._order), *models)
        return next((name for name in coming if name in models and name != model), None)


def prefill_count(part: float, instances: int) -> int:
    """Returns how many instances prefill; at least one does, and one decodes. REQUIRES: at least
    two instances."""
    return min(instances - 1, max(1, round(part * instances)))
