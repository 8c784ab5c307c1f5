"""One copy of a model on a device or tensor-parallel group, from its activation to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from prism.sim.memory import Account
from prism.sim.setup import ModelSetup

if TYPE_CHECKING:
    from prism.sim.device import Device
    from prism.sim.engine import Engine


class Stage(Enum):
    """QUEUED: waits for memory on its devices; LOADING: weights are on their way."""

    QUEUED = "queued"
    LOADING = "loading"
    ACTIVE = "active"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class Resident:
    """devices: rank 0 first; `home`, whose queue holds its requests. ready_s: when it will be
    active, as far as known. pooled: its KV lies in a pool that models of its devices share.
    replaces: the copy that it takes over from, when it is the target of a migration. waiting:
    its requests in the queue. leaves_s: when its memory will be free, once it is empty. after:
    copies that leave its home and have to be gone before it loads, as the live actuator waits
    for them. takes_running: what runs in the copy that it takes over from goes on here."""

    model: ModelSetup
    devices: list[Device]
    since_s: float
    ready_s: float
    kv_limit_bytes: int | None = None
    pooled: bool = False
    stage: Stage = Stage.QUEUED
    engine: Engine | None = None
    replaces: Resident | None = None
    replaced_by: Resident | None = None
    accounts: list[Account] = field(default_factory=list)
    waiting: int = 0
    last_use_s: float = field(default=float("-inf"))
    leaves_s: float | None = None
    after: list[Resident] = field(default_factory=list)
    takes_running: bool = False
    home: Device = field(init=False)

    def __post_init__(self) -> None:
        self.home = self.devices[0]

    @property
    def tp(self) -> int:
        return len(self.devices)

    def need_bytes(self, device: Device) -> int:
        """What it takes on `device` to come up: weights, engine, KV floor."""
        static_bytes = device.ledger.aligned(self.model.static_bytes(self.tp))
        return static_bytes + self.floor_bytes

    @property
    def floor_bytes(self) -> int:
        """KV that is always its own on each device; none where models share a pool of blocks."""
        return 0 if self.pooled else self.model.floor_bytes(self.tp)

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
        """New requests may be sent here; a migration's target only once it is ready."""
        if self.replaces is not None:
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
