"""Token-level switching: models alternate on a device in turns of a few seconds.

A switch happens between two tokens; weights and KV of the other models are in host memory. Some
devices prefill and the others decode. Pure data and functions; times in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class PrefillGroup(NamedTuple):
    """Prompts of one model that are prefilled one after another."""

    model: str
    # Number of requests that ever joined it.
    size: int


class PrefillQueue(NamedTuple):
    """Work of a prefill device."""

    # The running group is first.
    groups: tuple[PrefillGroup, ...]
    # Time until all groups are done, including the switches between them.
    load_s: float


class TurnBatch(NamedTuple):
    """Requests of one model on a decode device."""

    model: str
    # Time of one decode step with all requests.
    step_s: float
    slo_tpot_s: float
    # Time to bring weights and KV onto the device.
    switch_s: float


@dataclass(frozen=True, slots=True)
class InstanceTurn:
    """Models that an instance of the live cluster should have now. Input of `Policy.plan`."""

    # Rank 0 first.
    devices: tuple[str, ...]
    # True if it prefills, False if it decodes.
    prefills: bool
    # Model whose turn it is; None: the instance should be empty.
    model: str | None = None
    # Model of the next switch, loaded in advance where memory and an engine are free.
    following: str | None = None
    # KV that `model` may still need until then, on each device. The following model leaves again if
    # less is free.
    growth_bytes: int = 0
    # Length of the turn; 0 on a prefill instance.
    quota_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TurnPolicy:
    """Policy of token-level switching. It decides which instance and when, `Policy.plan` on the
    actions."""

    # Fraction of the devices that prefill; at least one prefills and one decodes.
    prefill_part: float
    # (model, queues) -> index of the queue that a request joins, and of its group; None: a new one.
    prefill_on: Callable[[str, Sequence[PrefillQueue]], tuple[int, int | None]]
    # (model, models of each device's batches) -> index of the device.
    decode_on: Callable[[str, Sequence[Sequence[str]]], int]
    # Returns the length of each batch's turn in a device's next round.
    quotas_s: Callable[[Sequence[TurnBatch]], tuple[float, ...]]
