"""Virtual queues: requests bound to devices in groups, models following the queues (QLM §4).

Used by policies that decide for each waiting request where it runs, instead of for each model
where it lives. Pure data; times in seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A waiting request."""

    id: str
    model: str
    arrival_s: float
    deadline_s: float
    prompt_tokens: int
    # Expected, from the model's history.
    output_tokens: float


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Requests of one model and one SLO, in order of arrival."""

    id: str
    model: str
    slo_s: float
    # The earliest of theirs.
    deadline_s: float
    requests: tuple[str, ...]
    # Expected, of all of them.
    output_tokens: float


@dataclass(frozen=True, slots=True)
class QueueDevice:
    """A serving instance: a device, or a tensor-parallel group named by its rank 0."""

    name: str
    # Resident or on its way.
    model: str | None
    # Requests that it executes.
    running: int
    # Models that it can hold.
    serves: frozenset[str]


@dataclass(frozen=True, slots=True)
class VirtualQueue:
    """The groups that a device serves, first one first: requests start from the groups at the front
    that are of its resident model; those behind wait until the model has been swapped."""

    device: str
    groups: tuple[RequestGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueView:
    """What requests are assigned from."""

    now_s: float
    # All of them, in a queue or not.
    waiting: tuple[QueuedRequest, ...]
    devices: tuple[QueueDevice, ...]
    # As last assigned.
    queues: tuple[VirtualQueue, ...]
    # Model -> output tokens per second of a device that runs it at full batch.
    tokens_per_s: Mapping[str, float]
    # Model -> seconds to bring it up in place of another.
    swap_s: Mapping[str, float]


Assign = Callable[[QueueView], tuple[VirtualQueue, ...]]
"""One queue per device, every waiting request in exactly one group or left out if nothing serves
its model."""
