"""Prefilling instances of token-level switching in the live cluster (Aegaeon §4.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prism.cluster.requests.turn_instances import Instance, Key, TurnCluster
from prism.policies.multiplexing.turns import InstanceTurn, PrefillQueue
from prism.policies.queues import QueuedRequest
from prism.scheduler.decision_journal import PrefillChosen
from prism.scheduler.token_turns import PrefillTurns, PromptGroup


@dataclass(slots=True)
class PrefillInstance(Instance):
    turns: PrefillTurns[QueuedRequest] = field(default_factory=PrefillTurns)


class PrefillInstances:
    """Instances with the groups of prompts that wait for them."""

    def __init__(self, cluster: TurnCluster) -> None:
        self._cluster = cluster
        self._grouped: set[str] = set()  # ids of all requests in groups
        self.all: list[PrefillInstance] = []

    def set(self, keys: Sequence[Key]) -> None:
        """Replaces the instances. One that stays keeps its groups."""
        kept = {(each.devices, each.serves): each for each in self.all}
        self.all = [kept.get(key) or PrefillInstance(*key) for key in keys]
        groups = (group for each in self.all for group in each.turns.groups)
        self._grouped = {request.id for group in groups for request in group.waiting}

    async def step(self, fresh: Sequence[QueuedRequest]) -> None:
        """Groups new requests, and starts those whose group's turn it is. Raises
        QueueUnavailableError."""
        self._grouped.intersection_update(request.id for request in fresh)
        for request in fresh:
            if request.id not in self._grouped:
                self._group(request)
        for each in self.all:
            self._cluster.note_empty(each)
            await self._step(each)

    def turns(self) -> Iterable[InstanceTurn]:
        models = self._cluster.models
        for each in self.all:
            groups, model = each.turns.groups, models.get(each.model or "")
            longest = max((r.prompt_tokens for group in groups for r in group.waiting), default=0)
            grown_bytes = longest * model.token_bytes if model is not None else 0
            yield InstanceTurn(
                each.devices,
                prefills=True,
                model=each.model,
                following=each.turns.following if groups and each.model is not None else None,
                growth_bytes=grown_bytes // len(each.devices),
            )

    # --- below ------------------------------------------------------------------------------

    def _group(self, request: QueuedRequest) -> None:
        """Adds a request to a group (Algorithm 1), unless no instance can hold its model now."""
        able = [each for each in self.all if self._cluster.can_hold(each, request.model)]
        if not able:
            return
        # The prefill in progress is not known, and counts as none.
        queues = tuple(each.turns.view(0.0) for each in able)
        number, place = self._choose(request.model, queues)
        instance, times = able[number], self._cluster.estimates.problem.times
        tp, tokens = len(instance.devices), request.prompt_tokens
        instance.turns.add(
            request,
            request.model,
            place,
            prompt_s=times.prefill_s(request.model, tp, 1, tokens, 1.0) if times else 0.0,
            switch_s=self._cluster.estimates.swap_s(request.model),
            resident=instance.model,
        )
        self._grouped.add(request.id)

    def _choose(self, model: str, queues: tuple[PrefillQueue, ...]) -> tuple[int, int | None]:
        number, place = self._cluster.policy.prefill_on(model, queues)
        if (journal := self._cluster.journal) is not None:
            now_s = self._cluster.state.now_s()
            journal.add(
                PrefillChosen(time_s=now_s, model=model, queues=queues, queue=number, group=place)
            )
        return number, place

    async def _step(self, instance: PrefillInstance) -> None:
        """Continues with the next group once the prompts of the first have left."""
        groups = instance.turns.groups
        while groups and not self._left(groups[0]) and not self._cluster.open(instance):
            groups.popleft()
        if not groups or not instance.is_empty:
            return
        first = groups[0]
        if not self._cluster.can_hold(instance, first.model):
            self._grouped.difference_update(request.id for request in first.waiting)
            groups.popleft()
            return
        instance.model, first.switch_s = first.model, 0.0
        if self._cluster.is_active(instance, first.model):
            left = await self._cluster.bind(instance, first.waiting)
            first.waiting.clear()
            first.waiting.extend(left)
            first.prompts_s = 0.0

    def _left(self, group: PromptGroup[QueuedRequest]) -> int:
        """Drops cancelled requests. Returns the number of the others that wait."""
        if any(request.id not in self._grouped for request in group.waiting):
            kept = [request for request in group.waiting if request.id in self._grouped]
            group.waiting.clear()
            group.waiting.extend(kept)
        return len(group.waiting)
