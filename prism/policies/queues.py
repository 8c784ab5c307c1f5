"""Virtual queues: groups of requests assigned to devices; models follow the queues (QLM §4).

For policies that place waiting requests instead of models. Pure data; times in seconds of one
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """Waiting request."""

    id: str
    model: str
    arrival_s: float
    deadline_s: float
    prompt_tokens: int
    # Expected, from the model's history.
    output_tokens: float
    # True if it waits in the middle of its output.
    is_resumed: bool = False


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Requests of one model and one SLO, in order of arrival."""

    id: str
    model: str
    slo_s: float
    # Earliest deadline of its requests.
    deadline_s: float
    # Request ids.
    requests: tuple[str, ...]
    # Expected, summed over its requests.
    output_tokens: float


@dataclass(frozen=True, slots=True)
class QueueDevice:
    """Serving instance: a device, or a tensor-parallel group with the name of its rank 0."""

    name: str
    # Model that is resident or being activated.
    model: str | None
    # Number of running requests.
    running: int
    # Models that it can hold.
    serves: frozenset[str]


@dataclass(frozen=True, slots=True)
class VirtualQueue:
    """Groups that a device serves, in order.

    Requests start from the leading groups of the resident model. Later groups wait for a swap.
    """

    device: str
    groups: tuple[RequestGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueView:
    """Input of a request assignment."""

    now_s: float
    # All waiting requests, in a queue or not.
    waiting: tuple[QueuedRequest, ...]
    devices: tuple[QueueDevice, ...]
    # Last assignment.
    queues: tuple[VirtualQueue, ...]
    # Model -> output tokens per second of a device that runs it at full batch.
    tokens_per_s: Mapping[str, float]
    # Model -> seconds to swap it in.
    swap_s: Mapping[str, float]


Assign = Callable[[QueueView], tuple[VirtualQueue, ...]]
"""Returns one queue per device. Every waiting request is in exactly one group, or left out if no
device serves its model."""
