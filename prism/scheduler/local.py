"""The order and the admission of one device's waiting requests (Prism §6.3, Algorithm 2).

Step-driven: owns no thread, socket or sleep. It knows the device's queue, and plans only what
starts at once; engines have no waiting queue of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from prism.policies import moore_hodgson
from prism.policies.data import AdmissionJob, AdmissionOrder
from prism.policies.priority import order_by_priority
from prism.scheduler.order_by_model import OrderByModel
from prism.scheduler.ports import EngineView
from prism.scheduler.step_budget import StartResult, StepBudget, starts_alone

CHEAP_ORDER = 256
ORDER_S_PER_REQUEST = 1e-4


class Waiting(msgspec.Struct, frozen=True):
    """A request in the queue. Times are on the clock of `step`'s now_s.

    suspected_at: it is a suspect, which may have killed its engine when it had so many output
    tokens. It starts before all other requests, on an idle engine; then nothing starts there until
    it is cleared or ended.
    """

    id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    arrival_s: float
    deadline_s: float
    suspected_at: int | None = None
    priority: int = 0  # those of a higher one start first


@dataclass(frozen=True, slots=True)
class Limits:
    # Output tokens (at most max_tokens) that must fit beside the prompt.
    headroom_tokens: int = 64
    # How often others may overtake a request that lacks memory before memory is kept for it.
    passes_max: int = 8
    hold_s: float = 30.0  # memory is kept for so long at most
    # While late requests wait, the device's oldest one that can start has its turn after so many
    # others.
    late_every: int = 4
    # Prefill work that an engine may hold before it takes no more requests. One prefill step of
    # prefill_chunk_tokens is always allowed.
    prefill_horizon_s: float = 0.25
    prefill_chunk_tokens: int = 0
    # The order is computed anew whenever an engine could take a request if its memory allows, and
    # after this time while none could. With more than CHEAP_ORDER requests waiting it is kept for
    # ORDER_S_PER_REQUEST times those beyond.
    order_age_s: float = 0.25


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """What one step decided. The caller carries it out."""

    ids: tuple[str, ...] = ()  # in the order in which they start
    starts: Mapping[str, list[str]] = field(default_factory=dict)  # the same, by model
    # Model -> KV tokens that its first request lacks: ask others to give idle memory back.
    lacking: Mapping[str, int] = field(default_factory=dict)
    # Models of which a suspect waits until what runs on their engine has made way for it.
    make_way: tuple[str, ...] = ()
    # Model -> why its first request could not start, as of the last step that needed an order.
    blocked: Mapping[str, StartResult] = field(default_factory=dict)


class QueueObserver(Protocol):
    """Is told of every change of the queue and of every step."""

    def added(self, request: Waiting) -> None: ...

    def removed(self, request_ids: tuple[str, ...]) -> None: ...

    def stepped(self, now_s: float, views: Sequence[EngineView], plan: AdmissionPlan) -> None: ...


@dataclass(slots=True)
class _Choice:
    """One step's outcome so far."""

    ids: list[str] = field(default_factory=list)  # these start now
    blocked: dict[str, StartResult] = field(default_factory=dict)  # model -> why its first cannot
    heads: list[str] = field(default_factory=list)  # requests that lack memory
    lacking: dict[str, int] = field(default_factory=dict)  # model -> tokens that its head lacks
    make_way: list[str] = field(default_factory=list)  # models
    kept: bool = False  # memory is kept for one of the heads


class LocalScheduler:
    """Not thread-safe. Every request that was added is started or removed, never dropped. `order`:
    the policy's (jobs, now_s, prefill work in flight in s) -> AdmissionOrder."""

    def __init__(
        self,
        limits: Limits | None = None,
        order: Callable[[Iterable[AdmissionJob], float, float], AdmissionOrder] = (
            moore_hodgson.order
        ),
        observer: QueueObserver | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._observer = observer
        self._policy_order = order
        self._waiting: dict[str, Waiting] = {}
        self._line = OrderByModel(AdmissionOrder((), ()), self._waiting)
        self._unlisted: list[Waiting] = []
        self._left: set[str] = set()  # since the last order, which may still have them
        self._ordered_at_s = float("-inf")
        self._ordered_for: frozenset[str] = frozenset()
        self._changed = False
        self._since_late = 0  # starts since a late request had its turn, while one waits
        self._suspects: dict[str, int] = {}  # id -> suspected_at
        self._passed: Counter[str] = Counter()
        self._held_since_s: dict[str, float] = {}
        self._blocked: dict[str, StartResult] = {}

    def add(self, request: Waiting) -> None:
        """A second add of the same id replaces the first."""
        if request.id not in self._waiting:
            self._unlisted.append(request)
        self._waiting[request.id] = request
        self._suspects.pop(request.id, None)
        if request.suspected_at is not None:
            self._suspects[request.id] = request.suspected_at
        self._changed = True
        if request.id in self._left:  # put back: the order must not have it twice
            self._ordered_at_s = float("-inf")
        if self._observer is not None:
            self._observer.added(request)

    def remove(self, request_ids: Collection[str]) -> None:
        """They left the queue without being started. Unknown ids are ignored."""
        known = tuple(i for i in request_ids if i in self._waiting)
        self._drop(request_ids)
        if known and self._observer is not None:
            self._observer.removed(known)

    def _drop(self, request_ids: Collection[str]) -> None:
        self._left.update(request_ids)
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            self._suspects.pop(request_id, None)
            self._passed.pop(request_id, None)
            self._held_since_s.pop(request_id, None)
            self._changed = True
        if not self._waiting:
            self._forget_order()

    def waiting(self) -> Counter[str]:
        """Model -> waiting requests."""
        return Counter(request.model for request in self._waiting.values())

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def step(self, now_s: float, views: Sequence[EngineView]) -> AdmissionPlan:
        """Plan all that starts at once; it leaves the queue. `views`: the engines that serve or
        activate a model on this device.

        A request that cannot start blocks the later ones of its model only.
        """
        if not self._waiting:
            return AdmissionPlan()
        plan = self._plan(now_s, views)
        self._drop(plan.ids)
        if self._observer is not None:
            self._observer.stepped(now_s, views, plan)
        return plan

    def would_start_now(self, view: EngineView, prompt_tokens: int, max_tokens: int) -> bool:
        """Whether a request that comes while none waits would start at the next step: it then goes
        to its engine without an `add`. `view`: of its model, as it is now."""
        limits = self._limits
        headroom = 1 if view.running == 0 else min(max_tokens, limits.headroom_tokens)
        horizon_s, chunk_tokens = limits.prefill_horizon_s, limits.prefill_chunk_tokens
        return starts_alone(view, prompt_tokens, headroom, horizon_s, chunk_tokens)

    def _plan(self, now_s: float, views: Sequence[EngineView]) -> AdmissionPlan:
        if len(self._waiting) == 1 and (alone := self._start_alone(views)):
            return alone
        limits = self._limits
        budget = StepBudget(views, limits.prefill_horizon_s, limits.prefill_chunk_tokens)
        self._refresh_order(now_s, views, budget)
        choice = self._choose(now_s, budget)
        self._blocked = choice.blocked
        starts = self._by_model(choice.ids)
        make_way = tuple(choice.make_way)
        return AdmissionPlan(tuple(choice.ids), starts, choice.lacking, make_way, choice.blocked)

    def _start_alone(self, views: Collection[EngineView]) -> AdmissionPlan | None:
        """The only request that waits needs no order. None: it does not start like this."""
        (request,) = self._waiting.values()
        view = next((view for view in views if view.model == request.model), None)
        if view is None or self._held_since_s or self._suspects:
            return None
        if not self.would_start_now(view, request.prompt_tokens, request.max_tokens):
            return None
        return AdmissionPlan((request.id,), {request.model: [request.id]}, blocked=self._blocked)

    def _forget_order(self) -> None:
        """No request waits."""
        self._line.clear()
        self._unlisted.clear()
        self._left.clear()

    # --- order ------------------------------------------------------------------------------

    def _refresh_order(
        self, now_s: float, views: Collection[EngineView], budget: StepBudget
    ) -> None:
        for request in self._unlisted:
            self._line.add(request.id, request.model, request.priority)
        self._unlisted.clear()
        present = frozenset(view.model for view in views)
        if not self._is_order_due(now_s, present, budget):
            return
        by_model = {view.model: view for view in views}
        jobs = [_job(r, by_model[r.model]) for r in self._waiting.values() if r.model in by_model]
        busy_s = sum(view.pending_prefill_s for view in views)
        order = order_by_priority(self._policy_order, jobs, now_s, busy_s)
        self._line = OrderByModel(order, self._waiting)
        for request in self._waiting.values():
            if request.model not in by_model:
                self._line.add(request.id, request.model, request.priority)
        self._left.clear()
        self._ordered_at_s, self._ordered_for, self._changed = now_s, present, False

    def _is_order_due(self, now_s: float, present: frozenset[str], budget: StepBudget) -> bool:
        """A start goes by the order of its own moment: whether a request is given up must not hang
        on when the scheduler last looked."""
        age_s = now_s - self._ordered_at_s
        if age_s < max(0, len(self._waiting) - CHEAP_ORDER) * ORDER_S_PER_REQUEST:
            return False
        if age_s >= self._limits.order_age_s:
            return True
        changed = age_s > 0 or self._changed or present != self._ordered_for
        lined_up = self._line.models()
        return changed and any(model in lined_up and budget.is_open(model) for model in budget)

    def _sequence(self, budget: StepBudget, choice: _Choice) -> Iterator[Waiting]:
        """Suspects (those with the least output are the likeliest), held ones, on-time ones with
        late ones whose turn it is between them, the other late ones."""
        suspects = sorted(self._suspects, key=self._suspects.__getitem__)
        seen = dict.fromkeys([*suspects, *self._held_since_s])
        yield from [self._waiting[i] for i in seen]
        turns = True
        for following in self._line.walk(budget, choice.blocked):
            while turns and self._since_late >= self._limits.late_every:
                yield from self._turn(budget, choice, seen)
                turns = self._since_late < self._limits.late_every
            if following not in seen:
                seen[following] = None
                yield self._waiting[following]

    def _turn(
        self, budget: StepBudget, choice: _Choice, seen: dict[str, None]
    ) -> Iterator[Waiting]:
        """Late heads, oldest first, until one starts. Who could have started, had its model not
        just used up what its engine takes in a step, is the first of the next step instead."""
        for head in self._line.late_heads(seen):
            model = self._waiting[head].model
            if model not in choice.blocked and model in budget:
                seen[head] = None
                yield self._waiting[head]
                if choice.ids[-1:] == [head]:
                    self._since_late = 0
                    return
            if model in budget and budget.has_taken(model):
                return

    def _count_start(self, request: Waiting) -> None:
        """Late ones that start because no other one can leave the count as it is: with them, the
        turn of the oldest might never come. Those that go before others for their priority do
        not."""
        if not self._line.has_late():
            self._since_late = 0
        elif (
            request.id in self._held_since_s
            or not self._line.is_late(request.id)
            or self._line.has_late(below=request.priority)
        ):
            self._since_late += 1

    # --- admission --------------------------------------------------------------------------

    def _choose(self, now_s: float, budget: StepBudget) -> _Choice:
        self._end_old_holds(now_s)
        choice = _Choice()
        for request in self._sequence(budget, choice):
            if request.model in choice.blocked or request.model not in budget:
                continue
            if request.suspected_at is not None and not budget.idle(request.model):
                choice.blocked[request.model] = StartResult.TRIAL
                choice.make_way += () if budget.on_trial(request.model) else (request.model,)
                continue
            result, missing_tokens, harmless = self._try(budget, request, choice.kept)
            if result is StartResult.STARTS:
                choice.ids.append(request.id)
                self._count_start(request)
                if request.suspected_at is not None:
                    choice.blocked[request.model] = StartResult.TRIAL
                if not harmless:
                    choice.kept = self._count_passes(choice.heads, now_s) or choice.kept
                continue
            choice.blocked[request.model] = result
            if result is StartResult.MEMORY and not choice.kept:
                choice.heads.append(request.id)
                choice.lacking[request.model] = missing_tokens
                choice.kept = request.id in self._held_since_s
            if len(choice.blocked) == len(budget):
                break
        return choice

    def _try(
        self, budget: StepBudget, request: Waiting, kept: bool
    ) -> tuple[StartResult, int, bool]:
        """Take the request if it starts: (result, KV tokens it lacks, whether it takes only what
        no other model could have). `kept`: all other memory is kept for another request."""
        headroom = self._headroom_tokens(budget, request)
        need_tokens = budget.need_tokens(request.model, request.prompt_tokens, headroom)
        result = budget.start_result(request.model, need_tokens)
        harmless = budget.is_guaranteed(request.model, need_tokens)
        if result is StartResult.STARTS and kept and not harmless:
            result = StartResult.MEMORY
        if result is StartResult.STARTS:
            budget.take(request.model, request.prompt_tokens, headroom)
        return result, need_tokens - budget.free_tokens(request.model), harmless

    def _headroom_tokens(self, budget: StepBudget, request: Waiting) -> int:
        """An idle engine's first request needs none: the engine's own reserve lets one request run
        to its end."""
        if budget.idle(request.model):
            return 1
        return min(request.max_tokens, self._limits.headroom_tokens)

    def _count_passes(self, heads: list[str], now_s: float) -> bool:
        """One more request went past `heads`, which lack memory. True: from now on it is kept."""
        self._passed.update(heads)
        overtaken = [i for i in heads if self._passed[i] >= self._limits.passes_max]
        for request_id in overtaken:
            self._held_since_s.setdefault(request_id, now_s)
        return bool(overtaken)

    def _end_old_holds(self, now_s: float) -> None:
        """A bound, so that a request that never fits cannot stop the device for ever."""
        for request_id, since_s in list(self._held_since_s.items()):
            if now_s - since_s > self._limits.hold_s:
                del self._held_since_s[request_id]
                del self._passed[request_id]

    def _by_model(self, request_ids: list[str]) -> dict[str, list[str]]:
        by_model: dict[str, list[str]] = {}
        for request_id in request_ids:
            by_model.setdefault(self._waiting[request_id].model, []).append(request_id)
        return by_model


def _job(request: Waiting, view: EngineView) -> AdmissionJob:
    prefill_s = request.prompt_tokens / view.prefill_tokens_per_s
    return AdmissionJob(
        request.id,
        request.model,
        request.arrival_s,
        request.deadline_s,
        prefill_s,
        view.ready_in_s,
        request.priority,
    )
