"""Outcome of each request, in columns, and the log of decisions."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from prism_sim.core.request import SimRequest
from prism_sim.core.workload import Workload

NEVER = -1.0


class Decision(NamedTuple):
    """Action of the cluster scheduler, or its completion."""

    time_s: float
    # activate, evict, migrate, refuse, active, evicted, migrated or failed
    kind: str
    model: str
    device: str
    target: str = ""
    reason: str = ""


class ModelMemory(NamedTuple):
    """Memory of one model on one device."""

    # Index of the model.
    model: int
    weights_bytes: int
    kv_bytes: int


DEVICES_SAMPLED = 9
"""Most devices of which the memory over time is kept: one more than a plot shows."""


class ClusterSample(NamedTuple):
    """State of the cluster at one time."""

    time_s: float
    # Model index -> KV memory, summed over all devices.
    kv_bytes: dict[int, int]
    # Reserved memory, summed over all devices.
    reserved_bytes: int
    waiting: int
    running: int
    # Device -> memory of the models on it, for the first DEVICES_SAMPLED devices.
    devices: dict[str, tuple[ModelMemory, ...]]


@dataclass(slots=True)
class Records:
    """Columns of request outcomes, by request index.

    A time is NEVER if it did not happen. A request with an end_s and without an error got all its
    tokens.
    """

    work: Workload
    started_s: array[float] = field(init=False)
    first_s: array[float] = field(init=False)
    end_s: array[float] = field(init=False)
    # Number of the device where it started last, -1 before.
    device: array[int] = field(init=False)
    output_tokens: array[int] = field(init=False)
    # Prompt tokens found in a prefix cache.
    cached_tokens: array[int] = field(init=False)
    # Request index -> error code.
    errors: dict[int, str] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    samples: list[ClusterSample] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    ended: int = 0
    # Time at which the last request ended. The kernel's time may be later, because of timers.
    end_time_s: float = 0.0
    events: int = 0

    def __post_init__(self) -> None:
        size = len(self.work)
        self.started_s = array("d", [NEVER]) * size
        self.first_s = array("d", [NEVER]) * size
        self.end_s = array("d", [NEVER]) * size
        self.device = array("i", [-1]) * size
        self.output_tokens = array("i", [0]) * size
        self.cached_tokens = array("i", [0]) * size

    def finish(self, request: SimRequest, time_s: float, error: str | None = None) -> None:
        """Records the end of a request. REQUIRES: it has not ended before."""
        index = request.index
        assert self.end_s[index] == NEVER, f"request {index} ends twice"
        self.started_s[index] = request.started_s
        self.first_s[index] = request.first_s
        self.end_s[index] = time_s
        self.device[index] = request.device
        self.output_tokens[index] = request.generated
        self.cached_tokens[index] = request.cached_tokens
        self.ended += 1
        self.end_time_s = time_s
        if error is not None:
            self.errors[index] = error

    def count(self, what: str, number: int = 1) -> None:
        if number:
            self.counts[what] = self.counts.get(what, 0) + number

    def decide(self, decision: Decision) -> None:
        self.decisions.append(decision)
        self.count(decision.kind)
