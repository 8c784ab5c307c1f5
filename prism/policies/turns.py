"""Token-level switching: a device computes for one model at a time, in turns of a few seconds, and
another model takes its place between two tokens. Weights and KV wait in the host's memory.

Some devices prefill and the others decode. Pure data and functions; times in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class PrefillGroup(NamedTuple):
    """Prompts of one model that are computed one after another."""

    model: str
    # Requests that ever joined it.
    size: int


class PrefillQueue(NamedTuple):
    """What a device that prefills has to do."""

    # The one that runs is first.
    groups: tuple[PrefillGroup, ...]
    # Until all are done, with the switches between them.
    load_s: float


class TurnBatch(NamedTuple):
    """A model's requests on a device that decodes."""

    model: str
    # Of one decode step with all of them.
    step_s: float
    slo_tpot_s: float
    # To bring its weights and KV onto the device.
    switch_s: float


@dataclass(frozen=True, slots=True)
class TurnPolicy:
    """What decides in place of a cluster scheduler."""

    # The part of the devices that prefill; at least one does, and one decodes.
    prefill_part: float
    # (model, queues) -> the queue that a request joins, and which of its groups; None: a new one.
    prefill_on: Callable[[str, Sequence[PrefillQueue]], tuple[int, int | None]]
    # (model, the models that each device has batches of) -> the device.
    decode_on: Callable[[str, Sequence[Sequence[str]]], int]
    # How long the turn of each batch of a device is in the next round.
    quotas_s: Callable[[Sequence[TurnBatch]], tuple[float, ...]]
