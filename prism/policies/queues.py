"""Virtual queues: requests bound to devices in groups, models following the queues (QLM §4).

Used by policies that decide for each waiting request where it runs, instead of for each model
where it lives. Pure data; times in seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """output_tokens: expected, from the model's history."""

    id: str
    model: str
    arrival_s: float
    deadline_s: float
    prompt_tokens: int
    output_tokens: float


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Requests of one model and one SLO, in order of arrival. deadline_s: the earliest of theirs;
    output_tokens: expected, of all of them."""

    id: str
    model: str
    slo_s: float
    deadline_s: float
    requests: tuple[str, ...]
    output_tokens: float


@dataclass(frozen=True, slots=True)
class QueueDevice:
    """A serving instance: a device, or a tensor-parallel group named by its rank 0. model: resident
    or on its way. running: requests it executes. serves: models that it can hold."""

    name: str
    model: str | None
    running: int
    serves: frozenset[str]


@dataclass(frozen=True, slots=True)
class VirtualQueue:
    """The groups that a device serves, first one first: requests start from the groups at the front
    that are of its resident model; those behind wait until the model has been swapped."""

    device: str
    groups: tuple[RequestGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueView:
    """queues: as last assigned, with the requests still waiting; `waiting` has all of them.

    tokens_per_s: model -> output tokens per second of a device that runs it at full batch;
    swap_s: model -> seconds to bring it up in place of another."""

    now_s: float
    waiting: tuple[QueuedRequest, ...]
    devices: tuple[QueueDevice, ...]
    queues: tuple[VirtualQueue, ...]
    tokens_per_s: Mapping[str, float]
    swap_s: Mapping[str, float]


Assign = Callable[[QueueView], tuple[VirtualQueue, ...]]
"""One queue per device, every waiting request in exactly one group or left out if nothing serves
its model."""
