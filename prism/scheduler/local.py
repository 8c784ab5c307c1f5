"""The order and the admission of one device's waiting requests (Prism §6.3, Algorithm 2).

Step-driven: owns no thread, socket or sleep. It holds a mirror of the device's queue, and hands
to the engines only what starts at once; engines have no waiting queue of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from prism.policies import moore_hodgson
from prism.policies.data import Job, Order
from prism.ports import EnginePort, EngineView
from prism.scheduler.lineup import Lineup
from prism.scheduler.room import Room, Verdict, starts_alone

CHEAP_ORDER = 256
ORDER_S_PER_REQUEST = 1e-4


class Waiting(msgspec.Struct, frozen=True):
    """A request in the mirror. Times are on the clock of `step`'s now_s."""

    id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    arrival_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """headroom_tokens: output tokens (at most max_tokens) that must fit beside the prompt.
    passes_max: how often others may overtake a request that lacks memory before the memory is
    kept for it, and for how long at most (hold_s).
    late_every: how many others may go before a model's oldest late request until it is its turn.
    prefill_horizon_s: prefill work an engine may hold before it takes no more, but always one
    prefill step of prefill_chunk_tokens.
    order_age_s: the order is computed anew whenever an engine could take a request if its memory
    allows, and after this while none could; with more than CHEAP_ORDER waiting it is left alone for
    ORDER_S_PER_REQUEST times those beyond.
    """

    headroom_tokens: int = 64
    passes_max: int = 8
    hold_s: float = 30.0
    late_every: int = 4
    prefill_horizon_s: float = 0.25
    prefill_chunk_tokens: int = 0
    order_age_s: float = 0.25


@dataclass(slots=True)
class _Choice:
    """One step's outcome. ids: start now; blocked: models whose first request cannot, and why;
    heads: those that lack memory; lacking: model -> how many tokens; kept: memory is kept for one
    of them."""

    ids: list[str] = field(default_factory=list)
    blocked: dict[str, Verdict] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)
    lacking: dict[str, int] = field(default_factory=dict)
    kept: bool = False


class LocalScheduler:
    """Not thread-safe. Every request added is dispatched or removed, never dropped. `order`: the
    policy's (jobs, now_s, prefill work in flight in s) -> Order. `blocked`: why the first waiting
    request of a model could not start at the last step."""

    def __init__(
        self,
        engines: EnginePort,
        limits: Limits | None = None,
        order: Callable[[Iterable[Job], float, float], Order] = moore_hodgson.order,
    ) -> None:
        self._engines = engines
        self._limits = limits or Limits()
        self._policy_order = order
        self._waiting: dict[str, Waiting] = {}
        self._lineup = Lineup(Order((), ()), self._waiting)
        self._unlisted: list[Waiting] = []
        self._left: set[str] = set()  # since the last order, which may still have them
        self._ordered_at_s = float("-inf")
        self._ordered_for: frozenset[str] = frozenset()
        self._changed = False
        self._late_passed: Counter[str] = Counter()
        self._passed: Counter[str] = Counter()
        self._held_since_s: dict[str, float] = {}
        self.blocked: dict[str, Verdict] = {}

    def add(self, request: Waiting) -> None:
        """A second add of the same id replaces the first."""
        if request.id not in self._waiting:
            self._unlisted.append(request)
        self._waiting[request.id] = request
        self._changed = True
        if request.id in self._left:  # put back: the order must not have it twice
            self._ordered_at_s = float("-inf")

    def remove(self, request_ids: Collection[str]) -> None:
        """Gone from the queue for another reason than a dispatch. Unknown ids are ignored."""
        self._left.update(request_ids)
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            self._passed.pop(request_id, None)
            self._late_passed.pop(request_id, None)
            self._held_since_s.pop(request_id, None)
            self._changed = True
        if not self._waiting:
            self._forget_order()

    def waiting(self) -> Counter[str]:
        """Model -> waiting requests."""
        return Counter(request.model for request in self._waiting.values())

    def __len__(self) -> int:
        return len(self._waiting)

    def step(self, now_s: float) -> list[str]:
        """Dispatch through the port all that starts at once; returns the ids in their order.

        A request that cannot start blocks the later ones of its model only.
        """
        if not self._waiting:
            return []
        views = self._engines.views()
        if len(self._waiting) == 1 and (alone := self._start_alone(views)):
            return alone
        limits = self._limits
        room = Room(views, limits.prefill_horizon_s, limits.prefill_chunk_tokens)
        self._refresh_order(now_s, views, room)
        choice = self._choose(now_s, room)
        self.blocked = choice.blocked
        for model, ids in self._by_model(choice.ids).items():
            self._engines.dispatch(model, ids)
        self._count_late_passes(choice.ids)
        self.remove(choice.ids)
        for model, tokens in choice.lacking.items():
            self._engines.ask_memory(model, tokens)
        return choice.ids

    def passes(self, view: EngineView, prompt_tokens: int, max_tokens: int) -> bool:
        """Whether a request that comes while nobody waits would start at the next step: it then
        goes to its engine without an `add`. `view`: of its model, as it is now."""
        return self._starts_alone(view, prompt_tokens, max_tokens)

    def _forget_order(self) -> None:
        """Nobody waits."""
        self._lineup.clear()
        self._unlisted.clear()
        self._left.clear()

    def _starts_alone(self, view: EngineView, prompt_tokens: int, max_tokens: int) -> bool:
        limits = self._limits
        headroom = 1 if view.running == 0 else min(max_tokens, limits.headroom_tokens)
        horizon_s, chunk_tokens = limits.prefill_horizon_s, limits.prefill_chunk_tokens
        return starts_alone(view, prompt_tokens, headroom, horizon_s, chunk_tokens)

    def _start_alone(self, views: Collection[EngineView]) -> list[str]:
        """The only request that waits needs no order: it starts, or the list is empty."""
        (request,) = self._waiting.values()
        view = next((view for view in views if view.model == request.model), None)
        if view is None or self._held_since_s:
            return []
        if not self._starts_alone(view, request.prompt_tokens, request.max_tokens):
            return []
        ids = [request.id]
        self._engines.dispatch(request.model, ids)
        self.remove(ids)
        return ids

    # --- order ------------------------------------------------------------------------------

    def _refresh_order(self, now_s: float, views: Collection[EngineView], room: Room) -> None:
        for request in self._unlisted:
            self._lineup.add(request.id, request.model)
        self._unlisted.clear()
        present = frozenset(view.model for view in views)
        if not self._is_order_due(now_s, present, room):
            return
        by_model = {view.model: view for view in views}
        jobs = [_job(r, by_model[r.model]) for r in self._waiting.values() if r.model in by_model]
        busy_s = sum(view.pending_prefill_s for view in views)
        self._lineup = Lineup(self._policy_order(jobs, now_s, busy_s), self._waiting)
        for request in self._waiting.values():
            if request.model not in by_model:
                self._lineup.add(request.id, request.model)
        self._left.clear()
        self._ordered_at_s, self._ordered_for, self._changed = now_s, present, False

    def _is_order_due(self, now_s: float, present: frozenset[str], room: Room) -> bool:
        """A start goes by the order of its own moment: whether a request is given up must not hang
        on when the scheduler last looked."""
        age_s = now_s - self._ordered_at_s
        if age_s < max(0, len(self._waiting) - CHEAP_ORDER) * ORDER_S_PER_REQUEST:
            return False
        if age_s >= self._limits.order_age_s:
            return True
        changed = age_s > 0 or self._changed or present != self._ordered_for
        lined_up = self._lineup.models()
        return changed and any(model in lined_up and room.is_open(model) for model in room)

    def _sequence(self, room: Room, blocked: Collection[str]) -> Iterator[Waiting]:
        """Held ones, late ones whose turn it is, on-time ones, the other late ones."""
        heads = self._lineup.late_heads()
        turns = [i for i in heads if self._late_passed[i] >= self._limits.late_every]
        first = dict.fromkeys([*self._held_since_s, *turns])
        yield from (self._waiting[i] for i in first)
        for request_id in self._lineup.walk(room, blocked):
            if request_id not in first:
                yield self._waiting[request_id]

    def _count_late_passes(self, dispatched: Collection[str]) -> None:
        for request_id in self._lineup.late_heads() if dispatched else ():
            if request_id not in dispatched:
                self._late_passed[request_id] += len(dispatched)

    # --- admission --------------------------------------------------------------------------

    def _choose(self, now_s: float, room: Room) -> _Choice:
        self._end_old_holds(now_s)
        choice = _Choice()
        for request in self._sequence(room, choice.blocked):
            if request.model in choice.blocked or request.model not in room:
                continue
            verdict, missing_tokens, harmless = self._try(room, request, choice.kept)
            if verdict is Verdict.STARTS:
                choice.ids.append(request.id)
                if not harmless:
                    choice.kept = self._count_passes(choice.heads, now_s) or choice.kept
                continue
            choice.blocked[request.model] = verdict
            if verdict is Verdict.MEMORY and not choice.kept:
                choice.heads.append(request.id)
                choice.lacking[request.model] = missing_tokens
                choice.kept = request.id in self._held_since_s
            if len(choice.blocked) == len(room):
                break
        return choice

    def _try(self, room: Room, request: Waiting, kept: bool) -> tuple[Verdict, int, bool]:
        """Take the request if it starts: (verdict, KV tokens it lacks, whether it takes only what
        no other model could have). `kept`: all other memory is kept for somebody."""
        headroom = self._headroom_tokens(room, request)
        need_tokens = room.need_tokens(request.model, request.prompt_tokens, headroom)
        verdict = room.verdict(request.model, need_tokens)
        harmless = room.harms_nobody(request.model, need_tokens)
        if verdict is Verdict.STARTS and kept and not harmless:
            verdict = Verdict.MEMORY
        if verdict is Verdict.STARTS:
            room.take(request.model, request.prompt_tokens, headroom)
        return verdict, need_tokens - room.free_tokens(request.model), harmless

    def _headroom_tokens(self, room: Room, request: Waiting) -> int:
        """An idle engine's first request needs none: the engine's own reserve lets one request run
        to its end."""
        if room.idle(request.model):
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


def _job(request: Waiting, view: EngineView) -> Job:
    prefill_s = request.prompt_tokens / view.prefill_tokens_per_s
    return Job(
        request.id,
        request.model,
        request.arrival_s,
        request.deadline_s,
        prefill_s,
        view.ready_in_s,
    )
