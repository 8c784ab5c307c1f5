"""Repetition of recorded decisions with the inputs from the live schedulers' journals.

The simulator's code gets the same inputs and no clock, so every decision must be equal.
"""

from __future__ import annotations

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
    total, equal, first = 0, 0, ""
    for record in (dated.record for dated in records):
        if policy.turns is None or not isinstance(record, TURN_CHOICES):
            continue
        live, again = _turn_choice(record, policy.turns)
        total += 1
        equal += live == again
        if live != again:
            first = first or f"live {live}, again {again}"
    return Check("choices of token-level switching", total, equal, first)


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
    replay = _Queue(policy)
    total, equal, first = 0, 0, ""
    for dated in records:
        record = dated.record
        if isinstance(record, Stepped) and record.views is not None:
            total += 1
            again = replay.scheduler.step(record.time_s, record.views).ids
            if again == record.ids:
                equal += 1
            else:
                first = first or f"live {record.ids}, again {again}"
        else:
            replay.take(dated)
    return Check(f"steps of {device}'s local scheduler", total, equal, first)


def check_steps(device: str, records: Records, policy: Policy) -> Check:
    """Checks every choice of a device's step control."""
    total, equal, first = 0, 0, ""
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
            total += 1
            equal += choice.jobs == record.jobs
            if choice.jobs != record.jobs:
                first = first or f"live {record.jobs}, again {choice.jobs}"
    return Check(f"choices of {device}'s step control", total, equal, first)


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
