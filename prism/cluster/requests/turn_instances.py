"""Instances of token-level switching in the live cluster, as far as all of them are alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prism.cluster.requests.estimates import Estimates
from prism.cluster.state.agents import ABSENT_STATES
from prism.cluster.state.scheduler_state import SchedulerState
from prism.policies.multiplexing.turns import TurnPolicy
from prism.policies.placement import ModelSpecView
from prism.policies.queues import QueuedRequest
from prism.queueing.request_queue import RequestQueue
from prism.scheduler.decision_journal import Sink

Key = tuple[tuple[str, ...], frozenset[str]]
"""Devices of an instance, rank 0 first, and the models that it serves."""


@dataclass(slots=True)
class Instance:
    """Devices on which models take turns."""

    devices: tuple[str, ...]
    serves: frozenset[str]
    # Model whose turn it is, or was; None: none since the devices were empty.
    model: str | None = None
    # False until the models that were on the devices before have left.
    is_empty: bool = False

    @property
    def name(self) -> str:
        return self.devices[0]


@dataclass(frozen=True, slots=True)
class TurnCluster:
    """Parts that all instances share."""

    state: SchedulerState
    queue: RequestQueue
    policy: TurnPolicy
    estimates: Estimates

    @property
    def journal(self) -> Sink | None:
        """Receives each choice with its input; None: none is kept."""
        journal = self.state.journal
        return journal if journal is not None and journal.inputs else None

    @property
    def models(self) -> Mapping[str, ModelSpecView]:
        """Models with their expected loads."""
        return {model.name: model for model in self.estimates.problem.models}

    def note_empty(self, instance: Instance) -> None:
        instance.is_empty = instance.is_empty or not any(map(self._has_models, instance.devices))

    def _has_models(self, device: str) -> bool:
        report = self.state.book.report(device)
        moves = self.state.actions.moves.values()
        here = report is not None and any(m.state not in ABSENT_STATES for m in report.models)
        return here or any(device in move.devices for move in moves)

    def can_hold(self, instance: Instance, model: str) -> bool:
        barred = self.state.activations.barred(model, self.state.now_s())
        return model in instance.serves and instance.name not in barred

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
