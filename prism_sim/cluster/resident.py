"""One copy of a model on a device or tensor-parallel group, from its activation to its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from prism_sim.core.request import SimRequest
from prism_sim.core.setup import ModelSetup
from prism_sim.engine.engine import SimEngine
from prism_sim.engine.memory import Account

if TYPE_CHECKING:
    from prism_sim.cluster.device import SimDevice


class Stage(Enum):
    """How far a copy has come."""

    # It waits for memory on its devices.
    QUEUED = "queued"
    # Its weights are on their way.
    LOADING = "loading"
    ACTIVE = "active"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class Resident:
    """One copy. Its requests wait in the queue of `home`, the device of rank 0."""

    model: ModelSetup
    # Rank 0 first.
    devices: Sequence[SimDevice]
    since_s: float
    # When it will be active, as far as known.
    ready_s: float
    kv_limit_bytes: int | None = None
    # Whether its KV lies in a pool that the models of its devices share.
    pooled: bool = False
    stage: Stage = Stage.QUEUED
    engine: SimEngine | None = None
    # The target of a migration takes over from this copy.
    replaces: Resident | None = None
    replaced_by: Resident | None = None
    accounts: list[Account] = field(default_factory=list)
    # Its waiting requests, by their key in the queue of `home`, in the order in which they came.
    queue: dict[str, SimRequest] = field(default_factory=dict)
    last_use_s: float = field(default=float("-inf"))
    # When it has been up for as long as it took to load.
    repaid_s: float = field(default=float("-inf"))
    # How long it took to load.
    load_s: float = 0.0
    # When its weights are in the node's host memory.
    weights_s: float = 0.0
    # Another copy serves the model until this one is up.
    joins: bool = False
    # When its memory will be free, once it is empty.
    leaves_s: float | None = None
    # Copies that must be gone before this one loads, as the live actuator waits for them.
    after: list[Resident] = field(default_factory=list)
    # Whether the requests that run in the replaced copy go on here.
    takes_running: bool = False
    home: SimDevice = field(init=False)

    def __post_init__(self) -> None:
        self.home = self.devices[0]

    @property
    def tp(self) -> int:
        return len(self.devices)

    def need_bytes(self, device: SimDevice) -> int:
        """What it takes on `device` to come up: weights, engine, KV floor."""
        static_bytes = device.ledger.aligned(self.model.static_bytes(self.tp))
        return static_bytes + self.floor_bytes

    @property
    def floor_bytes(self) -> int:
        """KV that is always its own on each device; none where models share a pool of blocks."""
        return 0 if self.pooled else self.model.floor_bytes(self.tp)

    @property
    def waiting(self) -> int:
        return len(self.queue)

    @property
    def first_s(self) -> float:
        """When the oldest of its waiting requests came: of several copies' requests that were
        divided anew it need not be the first. REQUIRES: there is one."""
        return min([request.queued_s for request in self.queue.values()])

    def grew_to(self, waiting: float) -> bool:
        """The last one to come made the queue so long, of a model that may have more copies."""
        if not self.queue or self.model.replicas_max == 1:
            return False
        queued = len(self.queue)
        return queued - 1 < max(1.0, waiting) <= queued

    @property
    def saturated_s(self) -> float:
        """When its queue will have lasted for long enough for another copy. REQUIRES: there is
        one."""
        return self.first_s + max(self.load_s, self.model.slo_ttft_s)

    @property
    def running(self) -> int:
        return self.engine.running if self.engine is not None else 0

    @property
    def kv_bytes(self) -> int:
        """On all its devices."""
        return self.engine.kv.kv_bytes * len(self.devices) if self.engine is not None else 0

    @property
    def open_requests(self) -> int:
        return self.waiting + self.running

    @property
    def takes_requests(self) -> bool:
        """New requests may be sent here; a migration's target, or a further copy, only once it is
        ready."""
        if self.replaces is not None or (self.joins and self.stage is not Stage.ACTIVE):
            return False
        return self.stage is not Stage.DRAINING

    @property
    def state(self) -> str:
        """In the terms of `ModelView.state`."""
        if self.stage is Stage.DRAINING:
            return "draining"
        if self.replaced_by is not None:
            return "migrating"
        return "active" if self.stage is Stage.ACTIVE else "activating"
