"""Engine processes of a device and their states (the engine pool of Prism §5.2)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from prism.messages.engine import Activated, EngineStatus
from prism.messages.gpu_memory import OutsideMemory

Counters = tuple[int, int, int]


def counters_of(status: EngineStatus) -> Counters:
    """Returns the engine's counters: maps, unmaps, retractions."""
    return status.maps_total, status.unmaps_total, status.retractions_total


class EngineKind(NamedTuple):
    """Fixed properties of an engine. It serves only models that need exactly these."""

    adapter: str = ""
    peers: tuple[str, ...] = ()  # devices of its other ranks


_PLAIN = EngineKind()


class EngineState(Enum):
    STARTING = "starting"
    FREE = "free"
    ACTIVATING = "activating"
    ACTIVE = "active"
    DRAINING = "draining"


@dataclass(slots=True)
class EngineProcess:
    """Engine process. Times are monotonic."""

    id: str
    since_s: float  # start of its state
    seen_s: float  # time of its last message
    state: EngineState = EngineState.STARTING
    pid: int = 0
    ended: bool = False  # True if it was reaped: another process may have its pid
    model: str | None = None
    activated: Activated | None = None
    status: EngineStatus | None = None  # the last one about `model`
    has_output: bool = False  # True if its model has had output since the activation
    counters: Counters = (0, 0, 0)  # of the last status about any model
    malformed_total: int = 0  # of the last status about any model
    is_fresh: bool = True  # True if it has served no model
    sm_percent: int = 100  # share of the GPU's SMs that it may use
    kind: EngineKind = _PLAIN
    outside: OutsideMemory | None = None  # its last figures of the GPU's memory
    replace_reason: str = ""  # why it is being replaced; empty if it is not
    replace_since_s: float = 0.0

    def become(self, state: EngineState, now_s: float, model: str | None = None) -> None:
        self.state, self.since_s, self.seen_s = state, now_s, now_s
        self.model, self.status = model, None
        self.has_output = False
        if state is not EngineState.ACTIVE:
            self.activated = None

    @property
    def token_bytes(self) -> int:
        """KV bytes per token of the active model; 1 before it is known."""
        if self.activated is None:
            return 1
        return -(-self.activated.quantum_bytes // self.activated.quantum_tokens)


class EnginePool:
    """Engines that are alive or starting. An engine that died is removed at once.

    Args:
        device: the device's local name, the prefix of engine ids.
        size: number of engines.
        sm_percent: one for each engine; a successor gets that of the engine that died.
        adapters: adapters with about equally many engines, unless models need others.
    """

    def __init__(
        self,
        device: str,
        size: int,
        sm_percent: Sequence[int] = (),
        adapters: Sequence[str] = ("",),
    ) -> None:
        self.size = size
        self.adapters = tuple(adapters)
        self._shares = Counter(sm_percent)
        self._prefix = device.replace(":", "")
        self._engines: dict[str, EngineProcess] = {}
        self._count = 0
        self.restarts_total = 0
        self.import_s = 0.0
        """Duration of the fork servers' imports, which an engine in a new process does again."""

    def create(self, now_s: float, kind: EngineKind | None = None) -> EngineProcess:
        """Adds an engine with a new id. The caller starts its process."""
        name = f"{self._prefix}-e{self._count}"
        share, kind = self._free_share(), kind or self.kind()
        engine = EngineProcess(name, now_s, now_s, sm_percent=share, kind=kind)
        self._count += 1
        self._engines[engine.id] = engine
        return engine

    def _free_share(self) -> int:
        """Returns the largest SM share that no engine has."""
        left = self._shares - Counter(engine.sm_percent for engine in self)
        return max(left, default=100)

    def get(self, engine_id: str) -> EngineProcess | None:
        return self._engines.get(engine_id)

    def remove(self, engine_id: str) -> EngineProcess | None:
        return self._engines.pop(engine_id, None)

    def kind(self, adapter: str = "", peers: tuple[str, ...] = ()) -> EngineKind:
        """Returns a kind. An empty `adapter` means the pool's first one."""
        return EngineKind(adapter or self.adapters[0], peers)

    def free(
        self,
        kind: EngineKind | None = None,
        fresh_only: bool = False,
        sm_share: float = 1.0,
        since_s: float = -math.inf,
    ) -> EngineProcess | None:
        """Returns the engine of this kind whose part of the SMs is nearest to `sm_share`, of these
        the one that has been free the longest.

        Args:
            kind: None means the first adapter on one device.
            fresh_only: whether the engine must not have served a model.
            since_s: earliest time at which it may have become free.
        """
        kind = kind or self.kind()
        suitable = (
            engine
            for engine in self._idle()
            if engine.kind == kind
            and (engine.is_fresh or not fresh_only)
            and engine.since_s >= since_s
        )
        return min(
            suitable,
            key=lambda engine: (abs(engine.sm_percent - 100 * sm_share), engine.since_s),
            default=None,
        )

    def unsuitable(self) -> EngineProcess | None:
        """Returns the free engine to replace for a model that needs another kind.

        Prefers engines that have served a model, then the one that has been free the longest.
        """
        return min(self._idle(), key=lambda engine: (engine.is_fresh, engine.since_s), default=None)

    def _idle(self) -> Iterator[EngineProcess]:
        return (engine for engine in self if engine.state is EngineState.FREE)

    def is_short_of(self, adapter: str) -> bool:
        """Returns whether the pool needs another engine of this adapter for its even split."""
        have = sum(engine.kind.adapter == adapter for engine in self)
        place = self.adapters.index(adapter)
        return self.is_short and have < len(range(place, self.size, len(self.adapters)))

    @property
    def is_short(self) -> bool:
        """True if an engine died and its successor has not been started yet."""
        return len(self) < self.size

    def count(self, state: EngineState) -> int:
        return sum(engine.state is state for engine in self)

    def __iter__(self) -> Iterator[EngineProcess]:
        return iter(list(self._engines.values()))

    def __len__(self) -> int:
        return len(self._engines)
