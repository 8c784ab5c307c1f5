"""Instances of token-level switching in the live cluster, as far as all of them are alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prism.cluster.requests.estimates import Estimates
from prism.cluster.state.agents import ABSENT_STATES
from prism.cluster.state.scheduler_state import SchedulerState
from prism.policies.multiplexing.turns import TurnPolicy
from prism.policies.placement import Unit
from prism.policies.queues import QueuedRequest
from prism.queueing.request_queue import RequestQueue
from prism.scheduler.decision_journal import AnyRecord


@dataclass(slots=True)
class Instance:
    """Devices on which models take turns."""

    unit: Unit
    # Model whose turn it is, or was; None: none since the devices were empty.
    model: str | None = None
    # False until the models that were on the devices before have left.
    is_empty: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        return self.unit.devices

    @property
    def name(self) -> str:
        """Device of rank 0."""
        return self.unit.devices[0]


AnyInstance = TypeVar("AnyInstance", bound=Instance)


def replaced(
    present: Iterable[AnyInstance], units: Sequence[Unit], make: Callable[[Unit], AnyInstance]
) -> list[AnyInstance]:
    """Returns the instances of `units`. One whose devices are the same stays as it is, with the
    unit's models."""
    kept = {each.devices: each for each in present}
    found = [kept.get(unit.devices) or make(unit) for unit in units]
    for each, unit in zip(found, units, strict=True):
        each.unit = unit
    return found


@dataclass(frozen=True, slots=True)
class TurnCluster:
    """Parts that all instances share."""

    state: SchedulerState
    queue: RequestQueue
    policy: TurnPolicy
    estimates: Estimates

    def note(self, record: Callable[..., AnyRecord], **fields: Any) -> None:
        """Writes a choice with its input to the journal, if that keeps inputs."""
        journal = self.state.journal
        if journal is not None and journal.inputs:
            journal.add(record(time_s=self.state.now_s(), **fields))

    def note_empty(self, instance: Instance) -> None:
        instance.is_empty = instance.is_empty or not any(map(self._has_models, instance.devices))

    def _has_models(self, device: str) -> bool:
        report = self.state.book.report(device)
        moves = self.state.actions.moves.values()
        here = report is not None and any(m.state not in ABSENT_STATES for m in report.models)
        return here or any(device in move.devices for move in moves)

    def can_hold(self, instance: Instance, model: str) -> bool:
        barred = self.state.activations.barred(model, self.state.now_s())
        serves = any(hosted.model == model for hosted in instance.unit.models)
        return serves and instance.name not in barred

    def able(self, instances: Iterable[AnyInstance], model: str) -> list[AnyInstance]:
        """Returns the instances that can hold the model now."""
        return [each for each in instances if self.can_hold(each, model)]

    def is_active(self, instance: Instance, model: str) -> bool:
        return self.state.book.state(instance.name, model) == "active"

    def open(self, instance: Instance) -> int:
        """Returns the number of requests that wait or run on the instance."""
        return self.state.waiting.open.get(instance.name, 0)

    async def bind(
        self, instance: Instance, requests: Iterable[QueuedRequest]
    ) -> list[QueuedRequest]:
        """Moves requests to the instance. Returns those that still wait: its model may have no
        route yet. Raises QueueUnavailableError."""
        waiting, given = self.state.waiting, list(requests)
        await waiting.bind(self.queue, instance.name, (request.id for request in given))
        return [request for request in given if waiting.has(request.id)]
