"""Causes of different choices in the two worlds.

The live scheduler's choice is repeated with the time or the prefill speeds of the simulation, and
all other inputs unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from lab.parity.runs import History, Wait
from prism.policies.data import EngineView, Waiting
from prism.policies.policy import Policy
from prism.scheduler.decision_journal import AnyRecord, Left, Queued, Stepped
from prism.scheduler.local_scheduler import Limits, LocalScheduler

MOMENT = "moment of the choice"
ESTIMATES = "prefill speeds"
BOTH = "moment and speeds"
FOLLOWS = "follows another difference"
SAME_CHOICE_S = 1.0
"""Largest time between two dispatches that count as the same choice."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Inputs of a local scheduler when it dispatched."""

    time_s: float
    """Time on the scheduler's own clock."""
    views: tuple[EngineView, ...]
    waiting: tuple[Waiting, ...]

    def later(self, seconds: float) -> Moment:
        return replace(self, time_s=self.time_s + seconds)

    def at_speeds_of(self, other: Moment) -> Moment:
        speeds = {view.model: view.prefill_tokens_per_s for view in other.views}
        return replace(self, views=tuple(_at_speed(v, speeds.get(v.model)) for v in self.views))


class Moments:
    """Inputs of local schedulers, read on demand from the records of their queues.

    To store them for all dispatches would take memory quadratic in the queue's length.
    """

    def __init__(self, queues: Mapping[str, Sequence[AnyRecord]]) -> None:
        self._queues = queues

    def at(self, device: str, position: int) -> Moment | None:
        """Returns the inputs of a dispatch, given its position among its queue's records.

        None if its inputs were not recorded, or if the step dispatched no request.
        """
        records = self._queues.get(device, ())
        step = records[position] if position < len(records) else None
        if not isinstance(step, Stepped) or not step.ids or step.views is None:
            return None
        return Moment(step.time_s, step.views, tuple(_waiting_at(records[:position])))


def _waiting_at(records: Iterable[AnyRecord]) -> list[Waiting]:
    """Returns the requests that wait after these records, in order of arrival."""
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
    """Finder of the causes of differences in the order of admission.

    A difference without its own cause follows from an earlier one of its device, if the queue has
    not been empty in between. All differences must be added in order with `add_difference`.
    """

    def __init__(
        self, policy: Policy, limits: Limits, live: Moments, simulated: Moments, run: History
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._live, self._simulated = live, simulated
        self._periods = _busy_periods(run)
        self._first: dict[tuple[str, int], int] = {}
        """(Device, busy period) -> rank of its first difference."""

    def add_difference(self, chosen: Wait) -> None:
        """Records that the dispatch of `chosen` is a difference."""
        self._first.setdefault((chosen.device, self._periods[chosen.request]), chosen.rank)

    def of(self, chosen: Wait, passed: Wait, twin: Wait, other: Wait) -> str | None:
        """Returns the cause of a difference, or None if none is found.

        Live, `chosen` went before `passed`. In simulation, `other` (the same request as `passed`)
        went before `twin` (the same as `chosen`).
        """
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
        variants = {
            MOMENT: ours.later(later_s),
            ESTIMATES: ours.at_speeds_of(theirs),
            BOTH: ours.later(later_s).at_speeds_of(theirs),
        }
        return next(
            (k for k, m in variants.items() if self._starts_before(m, passed, chosen)), None
        )

    def _starts_before(self, moment: Moment, first: Wait, second: Wait) -> bool:
        """Returns whether a scheduler without earlier steps starts `first` before `second`."""
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
    """Returns request -> number of its period, in which its device's queue was never empty."""
    found: dict[int, int] = {}
    period, device, ends = 0, "", 0
    for wait in sorted(run.waits.values(), key=lambda w: (w.device, w.queued)):
        if wait.device != device or wait.queued > ends:
            period, device, ends = period + 1, wait.device, 0
        ends = max(ends, wait.dispatched)
        found[wait.request] = period
    return found
