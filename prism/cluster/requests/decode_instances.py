"""Decoding instances of token-level switching in the live cluster (Aegaeon §4.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from prism.cluster.requests.turn_instances import Instance, TurnCluster, replaced
from prism.policies.multiplexing.turns import InstanceTurn, TurnBatch
from prism.policies.placement import ModelSpecView, Unit
from prism.policies.queues import QueuedRequest
from prism.scheduler.decision_journal import DecodeChosen, RoundChosen
from prism.scheduler.token_turns import DecodeTurns

OPEN_MAX = 2
"""Requests on an instance, as a multiple of those that its engine runs at once. More would be moved
there and back at each turn."""


@dataclass(slots=True)
class DecodeInstance(Instance):
    turns: DecodeTurns = field(kw_only=True)
    # Models with requests, in order of arrival.
    models: dict[str, None] = field(default_factory=dict)
    # Model whose requests are on the devices.
    held: str | None = None
    # True while `model` has a turn that has not ended.
    has_turn: bool = False
    quota_s: float = 0.0
    # End of the turn; infinity until it has begun.
    until_s: float = math.inf
    # True if requests wait for others of the turn to end.
    has_more: bool = False


class DecodeInstances:
    """Instances with the models that take turns on them."""

    def __init__(self, cluster: TurnCluster) -> None:
        self._cluster = cluster
        self.all: list[DecodeInstance] = []
        # Model -> its requests that wait for a turn, oldest first.
        self._waiting: Mapping[str, Sequence[QueuedRequest]] = {}

    def replace(self, units: Sequence[Unit]) -> None:
        """Replaces the instances. One that stays keeps its models."""
        self.all = replaced(self.all, units, self._made)

    def _made(self, unit: Unit) -> DecodeInstance:
        return DecodeInstance(unit, turns=DecodeTurns(partial(self._quotas_s, unit.devices[0])))

    def serves(self, model: str) -> bool:
        """Returns whether an instance can hold the model now."""
        return bool(self._cluster.able(self.all, model))

    async def step(self, resumed: Iterable[QueuedRequest], now_s: float) -> None:
        """Places models with requests, ends turns, and starts the requests of the models that have
        one. Raises QueueUnavailableError."""
        waiting: dict[str, list[QueuedRequest]] = {}
        for request in resumed:
            waiting.setdefault(request.model, []).append(request)
        self._waiting = waiting
        self._place()
        for each in self.all:
            self._cluster.note_empty(each)
            await self._step(each, now_s)

    def turns(self) -> Iterable[InstanceTurn]:
        """Yields the models that each instance should have now."""
        for each in self.all:
            following, growth_bytes, model = None, 0, each.model
            if model is not None and self._has_output(each, model):
                following = each.turns.following(model, each.models)
                growth_bytes = self._growth_bytes(each, model)
            yield InstanceTurn(each.devices, False, model, following, growth_bytes, each.quota_s)

    # --- models -----------------------------------------------------------------------------

    def _place(self) -> None:
        """Adds models to instances (Algorithm 2)."""
        for each in self.all:
            each.models = {m: None for m in each.models if self._has_requests(each, m)}
        placed = {model for each in self.all for model in each.models}
        for model in [model for model in self._waiting if model not in placed]:
            if able := self._cluster.able(self.all, model):
                models = tuple(tuple(each.models) for each in able)
                able[self._choose(model, models)].models.setdefault(model)

    def _has_requests(self, instance: DecodeInstance, model: str) -> bool:
        is_held = model == instance.held and self._cluster.open(instance) > 0
        return is_held or (model in self._waiting and self._cluster.can_hold(instance, model))

    def _choose(self, model: str, models: tuple[tuple[str, ...], ...]) -> int:
        number = self._cluster.policy.decode_on(model, models)
        self._cluster.note(DecodeChosen, model=model, models=models, instance=number)
        return number

    # --- turns ------------------------------------------------------------------------------

    async def _step(self, instance: DecodeInstance, now_s: float) -> None:
        """Begins the next turn once the present one has ended, and starts the model's requests."""
        if instance.is_empty and self._is_over(instance, now_s):
            turn = instance.turns.next(instance.models, lambda: self._batches(instance))
            instance.has_turn, instance.until_s = turn is not None, math.inf
            if turn is not None:
                instance.model, instance.quota_s = turn
        model, is_late, instance.has_more = instance.model, now_s >= instance.until_s, False
        if not instance.has_turn or model is None or is_late:
            return
        if not self._cluster.is_active(instance, model):
            return
        if model != instance.held and self._cluster.open(instance):
            return  # requests of the last turn are still leaving
        instance.held = model
        most = OPEN_MAX * self._cluster.state.config.engine.max_running
        room, waiting = max(0, most - self._cluster.open(instance)), self._waiting.get(model, ())
        await self._cluster.bind(instance, waiting[:room])
        instance.has_more = len(waiting) > room
        if instance.until_s == math.inf and self._cluster.open(instance):
            instance.until_s = now_s + instance.quota_s

    def _is_over(self, instance: DecodeInstance, now_s: float) -> bool:
        """Returns whether the instance needs a turn. A turn lasts until all requests that have
        started have had a token: it may be shorter than a step."""
        model = instance.model
        if not instance.has_turn or model is None or model not in instance.models:
            return True
        report = self._cluster.state.book.model(instance.name, model)
        all_started = report is not None and report.has_output and not report.starting
        return now_s >= instance.until_s and all_started

    def _has_output(self, instance: DecodeInstance, model: str) -> bool:
        """Returns whether the model's turn has begun, and its KV is in the device's report."""
        report = self._cluster.state.book.model(instance.name, model)
        return instance.until_s < math.inf and report is not None and report.has_output

    def _quotas_s(self, device: str, batches: Sequence[TurnBatch]) -> tuple[float, ...]:
        quotas_s = self._cluster.policy.quotas_s(batches)
        self._cluster.note(RoundChosen, device=device, batches=tuple(batches), quotas_s=quotas_s)
        return quotas_s

    def _batches(self, instance: DecodeInstance) -> list[TurnBatch]:
        """Returns the batches of a new round."""
        return [self._batch(instance, model) for model in instance.models]

    def _batch(self, instance: DecodeInstance, model: str) -> TurnBatch:
        slo_tpot_s = self._cluster.state.config.model(model).slo_tpot_s
        switch_s = self._cluster.estimates.swap_s(model)
        return TurnBatch(model, self._step_s(instance, model), slo_tpot_s, switch_s)

    def _step_s(self, instance: DecodeInstance, model: str) -> float:
        """Returns the time of a decode step with all of the model's requests."""
        count, tokens = self._size(instance, model)
        times, tp = self._cluster.estimates.problem.times, len(instance.devices)
        assert times is not None
        return times.decode_s(model, tp, count, tokens, 1.0)

    def _size(self, instance: DecodeInstance, model: str) -> tuple[int, float]:
        """Returns the number of requests that decode at once, and their mean length."""
        waiting, known = self._waiting.get(model, ()), self._spec(model)
        held = self._cluster.open(instance) if model == instance.held else 0
        usual = known.prompt_tokens + known.output_tokens / 2 if known is not None else 0.0
        tokens = sum(request.prompt_tokens for request in waiting) + held * usual
        count, most = len(waiting) + held, self._cluster.state.config.engine.max_running
        return max(1, min(count, most)), tokens / max(1, count)

    def _spec(self, model: str) -> ModelSpecView | None:
        models = self._cluster.estimates.problem.models
        return next((each for each in models if each.name == model), None)

    def _growth_bytes(self, instance: DecodeInstance, model: str) -> int:
        """Returns by how much the model's KV may still grow in its turn, on each device. A request
        gets a mean output at most."""
        known, report = self._spec(model), self._cluster.state.book.model(instance.name, model)
        if known is None or report is None:
            return 0
        count, tokens = self._size(instance, model)
        steps = min(known.output_tokens, instance.quota_s / self._step_s(instance, model))
        whole_bytes = int(count * (tokens + steps)) * known.token_bytes // len(instance.devices)
        return max(0, whole_bytes - report.kv_mapped_bytes)
