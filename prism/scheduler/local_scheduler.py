"""Order and admission of one device's waiting requests (Prism §6.3, Algorithm 2).

Step-driven: owns no thread, socket or sleep. The scheduler holds the device's queue and plans only
requests that start at once. Engines keep no waiting queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prism.policies.admission import moore_hodgson
from prism.policies.data import EngineView, Order, Waiting
from prism.scheduler.ordered_queue import OrderedQueue
from prism.scheduler.step_budget import StartResult, StepBudget, starts_alone


@dataclass(frozen=True, slots=True)
class Limits:
    """Parameters of the local scheduler."""

    # Output tokens (at most max_tokens) that must fit in addition to the prompt.
    headroom_tokens: int = 64
    # Requests that may overtake one that lacks memory before free memory is reserved for it.
    passes_max: int = 8
    hold_s: float = 30.0  # maximum duration of such a reservation
    # While late requests wait, the oldest one that can start does so after this many other starts.
    late_every: int = 4
    # Prefill work at which an engine takes no more requests. One prefill step of
    # prefill_chunk_tokens is always allowed.
    prefill_horizon_s: float = 0.25
    prefill_chunk_tokens: int = 0
    # Maximum age of the order while no engine could take a request. Otherwise the order is computed
    # at each step; with more than CHEAP_ORDER waiting requests it is kept for ORDER_S_PER_REQUEST
    # times the number beyond that.
    order_age_s: float = 0.25


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """Decisions of one step, for the caller to carry out."""

    ids: tuple[str, ...] = ()  # requests that start, in order
    starts: Mapping[str, list[str]] = field(default_factory=dict)  # the same, by model
    # Model -> KV tokens that its first request lacks: other engines should return idle memory.
    lacking: Mapping[str, int] = field(default_factory=dict)
    # Models whose running requests are to be preempted, because a suspect waits for an idle engine.
    preempt: tuple[str, ...] = ()
    # Model -> why its first request could not start, as of the last step that needed an order.
    blocked: Mapping[str, StartResult] = field(default_factory=dict)


class QueueObserver(Protocol):
    """Observer of every change of the queue and of every step."""

    def added(self, request: Waiting) -> None: ...

    def removed(self, request_ids: tuple[str, ...]) -> None: ...

    def stepped(self, now_s: float, views: Sequence[EngineView], plan: AdmissionPlan) -> None: ...


@dataclass(slots=True)
class _Choice:
    """Decisions of a step so far."""

    ids: list[str] = field(default_factory=list)  # requests that start
    blocked: dict[str, StartResult] = field(default_factory=dict)  # as in AdmissionPlan
    heads: list[str] = field(default_factory=list)  # first requests of models that lack memory
    lacking: dict[str, int] = field(default_factory=dict)  # as in AdmissionPlan
    preempt: list[str] = field(default_factory=list)  # models
    reserved: bool = False  # free memory is reserved for one of the heads


class LocalScheduler:
    """Scheduler of one device. Not thread-safe.

    A request leaves the scheduler only by being started or by `remove`.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        order: Order = moore_hodgson.order,
        observer: QueueObserver | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._observer = observer
        self._queue = OrderedQueue(order, self._limits.order_age_s)
        self._waiting = self._queue.requests
        self._since_late = 0  # starts since the last turn of a late request, while one waits
        self._suspects: dict[str, int] = {}  # id -> suspected_at
        self._passed: Counter[str] = Counter()  # id -> requests that overtook it
        self._held_since_s: dict[str, float] = {}  # id -> since when memory is reserved for it
        self._blocked: dict[str, StartResult] = {}

    def add(self, request: Waiting) -> None:
        """Adds a request, or replaces the one with the same id."""
        self._queue.add(request)
        self._suspects.pop(request.id, None)
        if request.suspected_at is not None:
            self._suspects[request.id] = request.suspected_at
        if self._observer is not None:
            self._observer.added(request)

    def remove(self, request_ids: Collection[str]) -> None:
        """Removes requests that left the queue without being started. Ignores unknown ids."""
        known = tuple(i for i in request_ids if i in self._waiting)
        self._drop(request_ids)
        if known and self._observer is not None:
            self._observer.removed(known)

    def _drop(self, request_ids: Collection[str]) -> None:
        self._queue.remove(request_ids)
        for request_id in request_ids:
            self._suspects.pop(request_id, None)
            self._passed.pop(request_id, None)
            self._held_since_s.pop(request_id, None)

    def waiting(self) -> Counter[str]:
        """Returns model -> number of waiting requests."""
        return Counter(request.model for request in self._waiting.values())

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def step(self, now_s: float, views: Sequence[EngineView]) -> AdmissionPlan:
        """Plans all requests that start now, and removes them from the queue.

        A request that cannot start blocks the later ones of its model only.

        Args:
            views: the engines that serve or activate a model on this device.
        """
        if not self._waiting:
            return AdmissionPlan()
        plan = self._plan(now_s, views)
        self._drop(plan.ids)
        if self._observer is not None:
            self._observer.stepped(now_s, views, plan)
        return plan

    def would_start_now(self, view: EngineView, prompt_tokens: int, max_tokens: int) -> bool:
        """Returns whether a request that arrives while none waits would start at the next step.

        The caller may then pass it to the engine without `add`.

        Args:
            view: the present view of its model's engine.
        """
        limits = self._limits
        headroom = 1 if view.running == 0 else min(max_tokens, limits.headroom_tokens)
        horizon_s, chunk_tokens = limits.prefill_horizon_s, limits.prefill_chunk_tokens
        return starts_alone(view, prompt_tokens, headroom, horizon_s, chunk_tokens)

    def _plan(self, now_s: float, views: Sequence[EngineView]) -> AdmissionPlan:
        if len(self._waiting) == 1 and (alone := self._start_alone(views)):
            return alone
        limits = self._limits
        budget = StepBudget(views, limits.prefill_horizon_s, limits.prefill_chunk_tokens)
        self._queue.refresh(now_s, views, budget)
        choice = self._choose(now_s, budget)
        self._blocked = choice.blocked
        starts = self._by_model(choice.ids)
        preempt = tuple(choice.preempt)
        return AdmissionPlan(tuple(choice.ids), starts, choice.lacking, preempt, choice.blocked)

    def _start_alone(self, views: Collection[EngineView]) -> AdmissionPlan | None:
        """Returns a plan for the only waiting request, which needs no order.

        Returns None if it cannot start or may need the full plan.
        """
        (request,) = self._waiting.values()
        view = next((view for view in views if view.model == request.model), None)
        if view is None or self._held_since_s or self._suspects:
            return None
        if not self.would_start_now(view, request.prompt_tokens, request.max_tokens):
            return None
        return AdmissionPlan((request.id,), {request.model: [request.id]}, blocked=self._blocked)

    # --- order ------------------------------------------------------------------------------

    def _sequence(self, budget: StepBudget, choice: _Choice) -> Iterator[Waiting]:
        """Yields the waiting requests in the order in which they are tried.

        First come suspects, those with the least output before others since they are the most
        likely to kill. Then come requests for which memory is reserved, on-time requests with one
        late request after every `late_every` starts, and the other late requests.
        """
        suspects = sorted(self._suspects, key=self._suspects.__getitem__)
        seen = dict.fromkeys([*suspects, *self._held_since_s])
        yield from [self._waiting[i] for i in seen]
        late_can_start = True
        for following in self._queue.order.walk(budget, choice.blocked):
            while late_can_start and self._since_late >= self._limits.late_every:
                yield from self._late_turn(budget, choice, seen)
                late_can_start = self._since_late < self._limits.late_every
            if following not in seen:
                seen[following] = None
                yield self._waiting[following]

    def _late_turn(
        self, budget: StepBudget, choice: _Choice, seen: dict[str, None]
    ) -> Iterator[Waiting]:
        """Yields the first late request of each model, oldest first, until one starts.

        If the model of one has already used its step budget, the turn is kept for the next step.
        """
        for head in self._queue.order.late_heads(seen):
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
        """Counts a start towards the next turn of a late request.

        A late request that starts because no on-time one can neither counts nor resets the count:
        otherwise the oldest one's turn might never come. It counts if late requests of a lower
        priority wait.
        """
        if not self._queue.order.has_late():
            self._since_late = 0
        elif (
            request.id in self._held_since_s
            or not self._queue.order.is_late(request.id)
            or self._queue.order.has_late(below=request.priority)
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
                choice.preempt += () if budget.on_trial(request.model) else (request.model,)
                continue
            result, missing_tokens, guaranteed = self._try(budget, request, choice.reserved)
            if result is StartResult.STARTS:
                choice.ids.append(request.id)
                self._count_start(request)
                if request.suspected_at is not None:
                    choice.blocked[request.model] = StartResult.TRIAL
                if not guaranteed:
                    choice.reserved = self._count_passes(choice.heads, now_s) or choice.reserved
                continue
            choice.blocked[request.model] = result
            if result is StartResult.MEMORY and not choice.reserved:
                choice.heads.append(request.id)
                choice.lacking[request.model] = missing_tokens
                choice.reserved = request.id in self._held_since_s
            if len(choice.blocked) == len(budget):
                break
        return choice

    def _try(
        self, budget: StepBudget, request: Waiting, reserved: bool
    ) -> tuple[StartResult, int, bool]:
        """Takes the request from the budget if it starts.

        Returns the result, the KV tokens that it lacks, and whether it needs only memory that no
        other model can take.

        Args:
            reserved: memory that other models can take is reserved for another request.
        """
        headroom = self._headroom_tokens(budget, request)
        need_tokens = budget.need_tokens(request.model, request.prompt_tokens, headroom)
        result = budget.start_result(request.model, need_tokens)
        guaranteed = budget.is_guaranteed(request.model, need_tokens)
        if result is StartResult.STARTS and reserved and not guaranteed:
            result = StartResult.MEMORY
        if result is StartResult.STARTS:
            budget.take(request.model, request.prompt_tokens, headroom)
        return result, need_tokens - budget.free_tokens(request.model), guaranteed

    def _headroom_tokens(self, budget: StepBudget, request: Waiting) -> int:
        """Returns the output tokens that must fit.

        An idle engine's first request needs only one: the engine's reserve suffices for one request
        to its end.
        """
        if budget.idle(request.model):
            return 1
        return min(request.max_tokens, self._limits.headroom_tokens)

    def _count_passes(self, heads: list[str], now_s: float) -> bool:
        """Counts a request that overtook `heads`, which lack memory.

        Returns whether free memory is now reserved for one of them.
        """
        self._passed.update(heads)
        overtaken = [i for i in heads if self._passed[i] >= self._limits.passes_max]
        for request_id in overtaken:
            self._held_since_s.setdefault(request_id, now_s)
        return bool(overtaken)

    def _end_old_holds(self, now_s: float) -> None:
        """Ends old reservations, so that a request that never fits cannot block the device."""
        for request_id, since_s in list(self._held_since_s.items()):
            if now_s - since_s > self._limits.hold_s:
                del self._held_since_s[request_id]
                del self._passed[request_id]

    def _by_model(self, request_ids: list[str]) -> dict[str, list[str]]:
        by_model: dict[str, list[str]] = {}
        for request_id in request_ids:
            by_model.setdefault(self._waiting[request_id].model, []).append(request_id)
        return by_model
