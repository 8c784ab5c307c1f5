"""Copies of a model, and the choice of the copy for a request as in `queueing/common.lua`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from prism.messages.prompt_prefix import PREFIX_KEPT_S, PREFIX_TOKENS, SLACK_REQUESTS
from prism_sim.core.prefix import HASH_TOKENS
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import ModelSetup
from prism_sim.engine.engine import SimEngine
from prism_sim.engine.memory import Account

if TYPE_CHECKING:
    from prism_sim.cluster.device import SimDevice

_BLOCKS = PREFIX_TOKENS // HASH_TOKENS


class Stage(Enum):
    """State of a copy."""

    # Waits for memory on its devices.
    QUEUED = "queued"
    # Loads its weights.
    LOADING = "loading"
    ACTIVE = "active"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class Resident:
    """One copy of a model, from its activation to its removal.

    Its requests wait in the queue of `home`, the device of rank 0.
    """

    model: ModelSetup
    # Rank 0 first.
    devices: Sequence[SimDevice]
    since_s: float
    # Expected time at which it becomes active.
    ready_s: float
    kv_limit_bytes: int | None = None
    # True if its KV is in a pool shared by the models of its devices.
    pooled: bool = False
    stage: Stage = Stage.QUEUED
    engine: SimEngine | None = None
    # Source of the migration whose target this copy is.
    replaces: Resident | None = None
    # Target of the migration whose source this copy is.
    replaced_by: Resident | None = None
    accounts: list[Account] = field(default_factory=list)
    # Waiting requests by key in the queue of `home`, in the order of enqueueing.
    queue: dict[str, SimRequest] = field(default_factory=dict)
    last_use_s: float = field(default=float("-inf"))
    # Time at which it has been active for as long as it took to load.
    repaid_s: float = field(default=float("-inf"))
    # Duration of its load.
    load_s: float = 0.0
    # Time at which its weights are in the node's host memory.
    weights_s: float = 0.0
    # True if other copies serve the model until this one is active.
    joins: bool = False
    # Time at which its memory is free; None until it is empty.
    unloaded_s: float | None = None
    # Copies that must be removed before this one loads, as in the live actuator.
    waits_for: list[Resident] = field(default_factory=list)
    # True if the running requests of the replaced copy move here.
    takes_running: bool = False
    home: SimDevice = field(init=False)

    def __post_init__(self) -> None:
        self.home = self.devices[0]

    @property
    def tp(self) -> int:
        return len(self.devices)

    def need_bytes(self, device: SimDevice) -> int:
        """Returns the memory that the activation needs on `device`: weights, engine, KV floor."""
        static_bytes = device.ledger.aligned(self.model.static_bytes(self.tp))
        return static_bytes + self.floor_bytes

    @property
    def floor_bytes(self) -> int:
        """KV reserved for the copy on each device; 0 if models share a pool of blocks."""
        return 0 if self.pooled else self.model.floor_bytes(self.tp)

    @property
    def waiting(self) -> int:
        return len(self.queue)

    @property
    def first_s(self) -> float:
        """Time at which the oldest waiting request entered the queue. That request need not be the
        first in `queue` after requests were divided anew among copies. REQUIRES: one waits."""
        return min([request.queued_s for request in self.queue.values()])

    def grew_to(self, waiting: float) -> bool:
        """Returns whether the newest request brought the queue to `waiting` requests. False if the
        model can have only one copy."""
        if not self.queue or self.model.replicas_max == 1:
            return False
        queued = len(self.queue)
        return queued - 1 < max(1.0, waiting) <= queued

    @property
    def saturated_s(self) -> float:
        """Time at which the queue has lasted long enough for another copy. REQUIRES: a request
        waits."""
        return self.first_s + max(self.load_s, self.model.slo_ttft_s)

    @property
    def running(self) -> int:
        return self.engine.running if self.engine is not None else 0

    @property
    def kv_bytes(self) -> int:
        """KV memory on all its devices together."""
        return self.engine.kv.kv_bytes * len(self.devices) if self.engine is not None else 0

    @property
    def open_requests(self) -> int:
        return self.waiting + self.running

    @property
    def takes_requests(self) -> bool:
        """True if new requests may be sent to the copy. The target of a migration and an additional
        copy take requests only once they are active."""
        if self.replaces is not None or (self.joins and self.stage is not Stage.ACTIVE):
            return False
        return self.stage is not Stage.DRAINING

    @property
    def state(self) -> str:
        """State as in `ModelView.state`."""
        if self.stage is Stage.DRAINING:
            return "draining"
        if self.replaced_by is not None:
            return "migrating"
        return "active" if self.stage is Stage.ACTIVE else "activating"


@dataclass(slots=True, eq=False)
class SimModel:
    """Copies of a model, and the requests that wait for a copy."""

    setup: ModelSetup
    residents: list[Resident] = field(default_factory=list)
    unplaced: dict[int, SimRequest] = field(default_factory=dict)
    # Device -> time until which it is not tried again.
    barred: dict[str, float] = field(default_factory=dict)
    last_use_s: float = float("-inf")
    wanted: bool = True
    refusal: str = ""
    # Tokens of removed copies.
    tokens_total: int = 0
    # Tokens of all copies at the last update of the rates.
    tokens_seen: int = 0
    # First blocks of a prompt -> home device of the copy that had them last, and when.
    prefix_homes: dict[tuple[int, ...], tuple[str, float]] = field(default_factory=dict)

    @property
    def needs_copy(self) -> bool:
        """True if the model should be activated on some device."""
        if self.unplaced:
            return True
        return not self.residents and (self.wanted or self.setup.never_evict)

    @property
    def busy(self) -> bool:
        """True if the model has open requests."""
        return bool(self.unplaced) or any(r.open_requests for r in self.residents)

    @property
    def active(self) -> list[Resident]:
        """Copies that can compute."""
        return [r for r in self.residents if r.engine and r.stage is Stage.ACTIVE]

    def withdraw_all(self) -> list[SimRequest]:
        """Removes all open requests from the queues and returns them in the order of arrival."""
        left = list(self.unplaced.values())
        for resident in list(self.residents):
            left += resident.home.withdraw(resident)
            if resident.engine is not None:
                left += resident.engine.requests()
        return sorted(left, key=lambda request: request.index)

    def unplace_waiting(self) -> None:
        """Makes the waiting requests of all copies unplaced, in the order of arrival, so that they
        are divided anew."""
        waiting = [
            request
            for resident in self.residents
            if resident.takes_requests
            for request in resident.home.withdraw(resident)
        ]
        for request in sorted(waiting, key=lambda request: request.index):
            self.unplaced[request.index] = request

    def least_loaded(self) -> Resident | None:
        """Returns the copy with the fewest requests, or None if no copy takes requests."""
        if len(self.residents) == 1:
            (only,) = self.residents
            return only if only.takes_requests else None
        taking = [r for r in self.residents if r.takes_requests]
        return min(taking, key=lambda r: r.open_requests, default=None)

    def copy_for(self, hashes: Sequence[int], now_s: float) -> Resident | None:
        """Returns the copy for a new request, or None if no copy takes requests. Prefers the copy
        that last had a prompt with the same first blocks, which may still be in its cache.

        Args:
            hashes: Block ids of the prompt; empty if engines have no prefix cache.
            now_s: Present time.
        """
        least = self.least_loaded()
        if least is None or len(hashes) < _BLOCKS:
            return least
        copies = [r for r in self.residents if r.takes_requests]
        if len(copies) < 2:
            return least
        key = tuple(hashes[:_BLOCKS])
        device, since_s = self.prefix_homes.pop(key, ("", 0.0))
        most = least.open_requests + SLACK_REQUESTS
        target = least
        if now_s - since_s < PREFIX_KEPT_S:
            had = (r for r in copies if r.home.name == device and r.open_requests <= most)
            target = next(had, least)
        self.prefix_homes[key] = (target.home.name, now_s)
        self._forget(now_s)
        return target

    def _forget(self, now_s: float) -> None:
        """Drops expired prefixes; the oldest come first."""
        while now_s - next(iter(self.prefix_homes.values()))[1] >= PREFIX_KEPT_S:
            del self.prefix_homes[next(iter(self.prefix_homes))]
