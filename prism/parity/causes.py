"""Why the two worlds chose otherwise: the live scheduler's choice is made again with what was
otherwise in the simulation, the moment or the prefill speeds, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from prism.fakes import FakeEngines
from prism.journal import AnyRecord, Left, Queued, Stepped
from prism.parity.runs import Run, Wait
from prism.policies.registry import Policy
from prism.ports import EngineView
from prism.scheduler.local import Limits, LocalScheduler, Waiting

MOMENT = "moment of the choice"
ESTIMATES = "prefill speeds"
BOTH = "moment and speeds"
FOLLOWS = "follows another difference"
SAME_CHOICE_S = 1.0
"""Choices further apart are not the same one a little earlier or later."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What a local scheduler had before it when it dispatched; time_s is on its own clock."""

    time_s: float
    views: tuple[EngineView, ...]
    waiting: tuple[Waiting, ...]

    def later(self, seconds: float) -> Moment:
        return replace(self, time_s=self.time_s + seconds)

    def at_speeds_of(self, other: Moment) -> Moment:
        speeds = {view.model: view.prefill_tokens_per_s for view in other.views}
        return replace(self, views=tuple(_at_speed(v, speeds.get(v.model)) for v in self.views))


class Moments:
    """What local schedulers had to choose from, read off their queues' records when it is asked
    for: kept for all dispatches, it would grow with the square of the queue."""

    def __init__(self, queues: Mapping[str, Sequence[AnyRecord]]) -> None:
        self._queues = queues

    def at(self, device: str, position: int) -> Moment | None:
        """position: of the dispatch among its queue's records. None where its inputs were not kept,
        or nobody was dispatched."""
        records = self._queues.get(device, ())
        made = records[position] if position < len(records) else None
        if not isinstance(made, Stepped) or not made.ids or made.views is None:
            return None
        return Moment(made.time_s, made.views, tuple(_waiting_at(records[:position])))


def _waiting_at(records: Iterable[AnyRecord]) -> list[Waiting]:
    """Who waits after these, in the order in which they came."""
    waiting: dict[str, Queued] = {}
    for record in records:
        if isinstance(record, Queued):
            waiting[record.id] = record
        elif isinstance(record, Left | Stepped):
            for request_id in record.ids:
                waiting.pop(request_id, None)
    return [waiting_of(record) for record in waiting.values()]


def waiting_of(record: Queued) -> Waiting:
    return Waiting(
        id=record.id,
        model=record.model,
        prompt_tokens=record.prompt_tokens,
        max_tokens=record.max_tokens,
        arrival_s=record.arrival_s,
        deadline_s=record.deadline_s,
    )


class Causes:
    """What a difference in the order of admission comes from. One that no cause of its own explains
    follows from an earlier one of its device, if somebody has waited there ever since; `note` tells
    of these, in their order."""

    def __init__(
        self, policy: Policy, limits: Limits, live: Moments, simulated: Moments, run: Run
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._live, self._simulated = live, simulated
        self._periods = _busy_periods(run)
        self._first: dict[tuple[str, int], int] = {}

    def note(self, chosen: Wait) -> None:
        """`chosen` was a difference."""
        self._first.setdefault((chosen.device, self._periods[chosen.request]), chosen.rank)

    def of(self, chosen: Wait, passed: Wait, twin: Wait, other: Wait) -> str | None:
        """chosen went before passed live; simulated, as twin and other, it is the reverse. None:
        neither its own nor another's."""
        ours = self._live.at(chosen.device, chosen.dispatched)
        theirs = self._simulated.at(other.device, other.dispatched)
        own = None
        if ours is not None and theirs is not None:
            own = self._own(ours, theirs, other.dispatched_s - chosen.dispatched_s, chosen, passed)
        if own is not None:
            return own
        first = self._first.get((chosen.device, self._periods[chosen.request]), chosen.rank)
        return FOLLOWS if first < chosen.rank else None

    def _own(
        self, ours: Moment, theirs: Moment, later_s: float, chosen: Wait, passed: Wait
    ) -> str | None:
        if abs(later_s) > SAME_CHOICE_S or not self._starts_before(ours, chosen, passed):
            return None
        asked = {
            MOMENT: ours.later(later_s),
            ESTIMATES: ours.at_speeds_of(theirs),
            BOTH: ours.later(later_s).at_speeds_of(theirs),
        }
        return next((k for k, m in asked.items() if self._starts_before(m, passed, chosen)), None)

    def _starts_before(self, moment: Moment, first: Wait, second: Wait) -> bool:
        """By a scheduler that remembers nothing of earlier steps."""
        scheduler = LocalScheduler(
            FakeEngines(list(moment.views)), self._limits, self._policy.order
        )
        for request in moment.waiting:
            scheduler.add(request)
        ids = [*scheduler.step(moment.time_s), second.id]
        return first.id in ids and ids.index(first.id) < ids.index(second.id)


def _at_speed(view: EngineView, tokens_per_s: float | None) -> EngineView:
    if tokens_per_s is None:
        return view
    pending_tokens = view.pending_prefill_s * view.prefill_tokens_per_s
    return msgspec.structs.replace(
        view, prefill_tokens_per_s=tokens_per_s, pending_prefill_s=pending_tokens / tokens_per_s
    )


def _busy_periods(run: Run) -> dict[int, int]:
    """Request -> number of the period, of its device, in which somebody waited all the time."""
    found: dict[int, int] = {}
    period, device, ends = 0, "", 0
    for wait in sorted(run.waits.values(), key=lambda w: (w.device, w.queued)):
        if wait.device != device or wait.queued > ends:
            period, device, ends = period + 1, wait.device, 0
        ends = max(ends, wait.dispatched)
        found[wait.request] = period
    return found
