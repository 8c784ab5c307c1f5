"""The models of this device: their state, and counts that outlive their engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from prism.messages import EngineStatus, ModelSpec

Counters = tuple[int, int, int]


def counters_of(status: EngineStatus) -> Counters:
    """What an engine counts: maps, unmaps, retractions."""
    return status.maps_total, status.unmaps_total, status.retractions_total


class ModelState(Enum):
    """Values are those of `ModelReport.state`."""

    ACTIVATING = "activating"
    ACTIVE = "active"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(slots=True)
class Served:
    """One model that is here, coming, going or failed. Times are monotonic.

    engine_id is empty while it waits for an engine; not_before_s delays the next try.
    asked_s, sent_s: when an engine was asked to activate it, the first and the last time.
    needs_fresh: only an engine that has served nothing yet may have it; peers: only one whose other
    ranks run on these devices.
    `actions`: orders to answer when the present state ends.
    """

    spec: ModelSpec
    since_s: float
    state: ModelState = ModelState.ACTIVATING
    kv_limit_bytes: int | None = None
    sent_limit_bytes: int | None = None
    engine_id: str = ""
    not_before_s: float = 0.0
    memory_tries: int = 0
    actions: list[int] = field(default_factory=list)
    deaths_s: list[float] = field(default_factory=list)
    activation_s: float = 0.0
    asked_s: float = 0.0
    sent_s: float = 0.0
    needs_fresh: bool = False
    peers: tuple[str, ...] = ()
    stages_s: dict[str, float] = field(default_factory=dict)
    deactivating: bool = False
    error: str = ""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def takes_requests(self) -> bool:
        return self.state in (ModelState.ACTIVATING, ModelState.ACTIVE)

    @property
    def needs_engine(self) -> bool:
        return self.state is ModelState.ACTIVATING and not self.engine_id


@dataclass(slots=True)
class Totals:
    """Counts of one model since the agent started; they only grow.

    maps, unmaps and retractions are sums over the engines that served it: an engine's own
    counters start at zero with its process.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    failed: int = 0
    maps: int = 0
    unmaps: int = 0
    retractions: int = 0
    activations: int = 0
    last_request_unix_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    _seen: dict[str, Counters] = field(default_factory=dict)

    def begin(self, engine_id: str, counters: Counters) -> None:
        """This engine starts to serve the model; `counters` are what it has counted so far."""
        self._seen = {engine_id: counters}

    def observe(self, status: EngineStatus) -> None:
        """Take over what grew since this engine's last status about this model."""
        now = counters_of(status)
        before = self._seen.get(status.engine_id, now)
        self._seen[status.engine_id] = now
        grown = [n - b if n >= b else n for n, b in zip(now, before, strict=True)]
        self.maps += grown[0]
        self.unmaps += grown[1]
        self.retractions += grown[2]
        if status.prefill_tokens_per_s > 0:
            self.prefill_tokens_per_s = status.prefill_tokens_per_s


class Models:
    """name -> Served, and name -> Totals of every model ever seen here."""

    def __init__(self) -> None:
        self.served: dict[str, Served] = {}
        self._totals: dict[str, Totals] = {}

    def totals(self, name: str) -> Totals:
        return self._totals.setdefault(name, Totals())

    def active(self, name: str) -> Served | None:
        served = self.served.get(name)
        return served if served and served.state is ModelState.ACTIVE else None

    def on_engine(self, engine_id: str) -> Served | None:
        return next((s for s in self.served.values() if s.engine_id == engine_id), None)
