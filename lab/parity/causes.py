"""Why the two worlds chose differently. The live scheduler's choice is made again with one thing
of the simulation, the moment or the prefill speeds, and everything else as it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from lab.parity.runs import History, Wait
from prism.policies.policy import Policy
from prism.scheduler.journal import AnyRecord, Left, Queued, Stepped
from prism.scheduler.local import Limits, LocalScheduler, Waiting
from prism.scheduler.ports import EngineView

MOMENT = "moment of the choice"
ESTIMATES = "prefill speeds"
BOTH = "moment and speeds"
FOLLOWS = "follows another difference"
SAME_CHOICE_S = 1.0
"""Choices further apart than this are not the same choice."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What a local scheduler saw when it dispatched."""

    time_s: float
    """On the scheduler's own clock."""
    views: tuple[EngineView, ...]
    waiting: tuple[Waiting, ...]

    def later(self, seconds: float) -> Moment:
        return replace(self, time_s=self.time_s + seconds)

    def at_speeds_of(self, other: Moment) -> Moment:
        speeds = {view.model: view.prefill_tokens_per_s for view in other.views}
        return replace(self, views=tuple(_at_speed(v, speeds.get(v.model)) for v in self.views))


class Moments:
    """What local schedulers had to choose from, read from their queues' records on demand. Kept for
    all dispatches, it would grow with the square of the queue."""

    def __init__(self, queues: Mapping[str, Sequence[AnyRecord]]) -> None:
        self._queues = queues

    def at(self, device: str, position: int) -> Moment | None:
        """position: of the dispatch among its queue's records. None where its inputs were not kept,
        or the step dispatched nothing."""
        records = self._queues.get(device, ())
        made = records[position] if position < len(records) else None
        if not isinstance(made, Stepped) or not made.ids or made.views is None:
            return None
        return Moment(made.time_s, made.views, tuple(_waiting_at(records[:position])))


def _waiting_at(records: Iterable[AnyRecord]) -> list[Waiting]:
    """The requests that wait after these records, in order of arrival."""
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
        priority=record.priority,
    )


class Causes:
    """What differences in the order of admission come from. One without a cause of its own follows
    from an earlier one of its device, if the queue has not been empty since. `note` is told of all
    differences, in order."""

    def __init__(
        self, policy: Policy, limits: Limits, live: Moments, simulated: Moments, run: History
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
        """Live, `chosen` went before `passed`; simulated, as `twin` and `other`, it is the reverse.
        None: no cause was found."""
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
        """Whether a scheduler without memory of earlier steps starts `first` before `second`."""
        scheduler = LocalScheduler(self._limits, self._policy.order)
        for request in moment.waiting:
            scheduler.add(request)
        ids = [*scheduler.step(moment.time_s, moment.views).ids, second.id]
        return first.id in ids and ids.index(first.id) < ids.index(second.id)


def _at_speed(view: EngineView, tokens_per_s: float | None) -> EngineView:
    if tokens_per_s is None:
        return view
    pending_tokens = view.pending_prefill_s * view.prefill_tokens_per_s
    return msgspec.structs.replace(
        view, prefill_tokens_per_s=tokens_per_s, pending_prefill_s=pending_tokens / tokens_per_s
    )


def _busy_periods(run: History) -> dict[int, int]:
    """Request -> number of the period in which its device's queue was never empty."""
    found: dict[int, int] = {}
    period, device, ends = 0, "", 0
    for wait in sorted(run.waits.values(), key=lambda w: (w.device, w.queued)):
        if wait.device != device or wait.queued > ends:
            period, device, ends = period + 1, wait.device, 0
        ends = max(ends, wait.dispatched)
        found[wait.request] = period
    return found
