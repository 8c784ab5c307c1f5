"""Prefilling instances of token-level switching in the live cluster (Aegaeon §4.2)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prism.cluster.requests.turn_instances import Instance, TurnCluster, replaced
from prism.policies.multiplexing.turns import InstanceTurn, PrefillQueue
from prism.policies.placement import Unit
from prism.policies.queues import QueuedRequest
from prism.scheduler.decision_journal import PrefillChosen
from prism.scheduler.token_turns import PrefillTurns, PromptGroup

AT_ONCE = 100
"""Number of requests that are grouped before other tasks get their turn."""


@dataclass(slots=True)
class PrefillInstance(Instance):
    turns: PrefillTurns[QueuedRequest] = field(default_factory=PrefillTurns)
    # Length of the longest prompt of the first group, bound ones included.
    longest_tokens: int = 0


class PrefillInstances:
    """Instances with the groups of prompts that wait for them."""

    def __init__(self, cluster: TurnCluster) -> None:
        self._cluster = cluster
        self._grouped: set[str] = set()  # ids of all requests in groups
        self.all: list[PrefillInstance] = []

    def replace(self, units: Sequence[Unit]) -> None:
        """Replaces the instances. One that stays keeps its groups."""
        self.all = replaced(self.all, units, PrefillInstance)
        groups = (group for each in self.all for group in each.turns.groups)
        self._grouped = {request.id for group in groups for request in group.waiting}

    async def step(self, fresh: Sequence[QueuedRequest]) -> None:
        """Groups new requests, and starts those whose group's turn it is. Raises
        QueueUnavailableError."""
        self._grouped.intersection_update(request.id for request in fresh)
        new = [request for request in fresh if request.id not in self._grouped]
        models = {request.model for request in new}
        able = {model: self._cluster.able(self.all, model) for model in models}
        for number, request in enumerate(new):
            self._group(request, able)
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        for each in self.all:
            self._cluster.note_empty(each)
            await self._step(each)

    def turns(self) -> Iterable[InstanceTurn]:
        """Yields the models that each instance should have now."""
        token_bytes = {m.name: m.token_bytes for m in self._cluster.estimates.problem.models}
        for each in self.all:
            growth_bytes = each.longest_tokens * token_bytes.get(each.model or "", 0)
            has_turn = each.model is not None and each.turns.groups
            yield InstanceTurn(
                each.devices,
                prefills=True,
                model=each.model,
                following=each.turns.following if has_turn else None,
                growth_bytes=growth_bytes // len(each.devices),
            )

    # --- below ------------------------------------------------------------------------------

    def _group(self, request: QueuedRequest, able: Mapping[str, Sequence[PrefillInstance]]) -> None:
        """Adds a request to a group (Algorithm 1), unless no instance can hold its model now."""
        if not (instances := able[request.model]):
            return
        # The prefill in progress is not known, and counts as none.
        queues = tuple(each.turns.view(0.0) for each in instances)
        number, place = self._choose(request.model, queues)
        instance, times = instances[number], self._cluster.estimates.problem.times
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
        self._cluster.note(PrefillChosen, model=model, queues=queues, queue=number, group=place)
        return number, place

    async def _step(self, instance: PrefillInstance) -> None:
        """Continues with the next group once the prompts of the first have left."""
        turns = instance.turns
        while turns.groups and not self._left(turns.groups[0]) and not self._cluster.open(instance):
            self._end_group(instance)
        if not turns.groups or not instance.is_empty:
            return
        first = turns.groups[0]
        if not self._cluster.can_hold(instance, first.model):
            self._grouped.difference_update(request.id for request in first.waiting)
            self._end_group(instance)
            return
        instance.model, first.switch_s = first.model, 0.0
        lengths = [request.prompt_tokens for request in first.waiting]
        instance.longest_tokens = max([instance.longest_tokens, *lengths])
        if self._cluster.is_active(instance, first.model):
            left = await self._cluster.bind(instance, first.waiting)
            first.waiting.clear()
            first.waiting.extend(left)
            first.prompts_s = 0.0

    def _end_group(self, instance: PrefillInstance) -> None:
        instance.turns.end_group()
        instance.longest_tokens = 0

    def _left(self, group: PromptGroup[QueuedRequest]) -> int:
        """Drops cancelled requests. Returns the number of the others that wait."""
        if any(request.id not in self._grouped for request in group.waiting):
            kept = [request for request in group.waiting if request.id in self._grouped]
            group.waiting.clear()
            group.waiting.extend(kept)
        return len(group.waiting)
