"""Repetition of recorded decisions with the inputs from the live schedulers' journals.

The simulator's code gets the same inputs and no clock, so every decision must be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from lab.parity.causes import waiting_of
from lab.parity.journals import Dated, Journals
from lab.parity.parity_results import Check
from prism.policies.data import Settings
from prism.policies.multiplexing.turns import TurnPolicy
from prism.policies.policy import Policy
from prism.scheduler.decision_journal import (
    DecodeChosen,
    Left,
    Opened,
    Planned,
    PrefillChosen,
    Queued,
    RoundChosen,
    Stepped,
    StepsChosen,
    fields_of,
)
from prism.scheduler.local_scheduler import Limits, LocalScheduler

Records = tuple[Dated, ...]
TURN_CHOICES = (PrefillChosen, DecodeChosen, RoundChosen)


def check_all(journals: Journals, policy: Policy) -> list[Check]:
    """Returns the checks of all schedulers; an empty list for journals without inputs."""
    checks = [check_plans(journals.cluster, policy), check_turns(journals.cluster, policy)]
    for device, records in journals.agents.items():
        checks += [check_queue(device, records, policy), check_steps(device, records, policy)]
    return [check for check in checks if check.decisions]


def check_plans(records: Records, policy: Policy) -> Check:
    """Checks every plan of the cluster scheduler, including plans without an action."""
    settings, total, equal, first = Settings(), 0, 0, ""
    for dated in records:
        record = dated.record
        if isinstance(record, Opened):
            settings = record.settings or Settings()
        elif isinstance(record, Planned):
            total += 1
            again = fields_of(policy.plan(record.view, settings))
            if msgspec.json.encode(again) == msgspec.json.encode(record.actions):
                equal += 1
            else:
                first = first or f"live {record.actions}, again {again}"
    return Check("plans of the cluster scheduler", total, equal, first)


def check_turns(records: Records, policy: Policy) -> Check:
    """Checks every choice of token-level switching."""
    found = (dated.record for dated in records)
    choices = (
        _turn_choice(record, policy.turns)
        for record in found
        if policy.turns is not None and isinstance(record, TURN_CHOICES)
    )
    return _compared("choices of token-level switching", choices)


def _compared(what: str, choices: Iterable[tuple[object, object]]) -> Check:
    """Returns the check of choices, each as it was recorded and as it is repeated."""
    total, equal, first = 0, 0, ""
    for live, again in choices:
        total += 1
        equal += live == again
        if live != again:
            first = first or f"live {live}, again {again}"
    return Check(what, total, equal, first)


def _turn_choice(
    record: PrefillChosen | DecodeChosen | RoundChosen, turns: TurnPolicy
) -> tuple[object, object]:
    """Returns the recorded choice, and the repeated one."""
    match record:
        case PrefillChosen():
            return (record.queue, record.group), turns.prefill_on(record.model, record.queues)
        case DecodeChosen():
            return record.instance, turns.decode_on(record.model, record.models)
        case RoundChosen():
            return record.quotas_s, turns.quotas_s(record.batches)


def check_queue(device: str, records: Records, policy: Policy) -> Check:
    """Checks every step of a device's local scheduler that had waiting requests."""
    return _compared(f"steps of {device}'s local scheduler", _queue_choices(records, policy))


def _queue_choices(records: Records, policy: Policy) -> Iterator[tuple[object, object]]:
    """Yields the recorded and the repeated dispatches."""
    replay = _Queue(policy)
    for dated in records:
        record = dated.record
        if isinstance(record, Stepped) and record.views is not None:
            yield record.ids, replay.scheduler.step(record.time_s, record.views).ids
        else:
            replay.take(dated)


def check_steps(device: str, records: Records, policy: Policy) -> Check:
    """Checks every choice of a device's step control."""
    return _compared(f"choices of {device}'s step control", _step_choices(records, policy))


def _step_choices(records: Records, policy: Policy) -> Iterator[tuple[object, object]]:
    """Yields the recorded and the repeated jobs."""
    names: set[str] = set()
    state: object = None
    for record in (dated.record for dated in records):
        if isinstance(record, Opened):
            names = set()
        elif isinstance(record, StepsChosen) and policy.steps is not None:
            present = {engine.model for engine in record.view.engines}
            if present != names:
                names, state = present, policy.steps.start(record.view)
            choice, state = policy.steps.choose(record.view, state)
            yield record.jobs, choice.jobs


class _Queue:
    """Local scheduler that is driven by recorded queue changes."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.begin(Limits())

    def begin(self, limits: Limits) -> None:
        self.scheduler = LocalScheduler(limits, self._policy.order)

    def take(self, dated: Dated) -> None:
        record = dated.record
        if isinstance(record, Opened):
            self.begin(record.limits or Limits())
        elif isinstance(record, Left):
            self.scheduler.remove(record.ids)
        elif isinstance(record, Queued):
            self.scheduler.add(waiting_of(record))
