"""The results file of a comparison, schema "prism-parity/1"."""

from __future__ import annotations

from collections import Counter

import msgspec

SCHEMA = "prism-parity/1"

CLASSES = {
    "activation timing": "a model was up in one world and still on its way in the other",
    "running slots": "an engine ran as many requests as it may, in one world",
    "prefill in flight": "an engine held a step's worth of prefill work, in one world",
    "KV limit": "a model's KV limit was reached, in one world",
    "free memory": "a request lacked KV memory, in one world",
    "arrival order": "requests that came together reached the queue the other way round",
    "moment of the choice": "a slot became free a little earlier in one world: at the simulated"
    " moment, the live scheduler chooses as the simulated one did",
    "prefill speeds": "engines had measured other speeds: with the simulated speeds, the live"
    " scheduler chooses as the simulated one did",
    "moment and speeds": "neither alone, but both together",
    "lateness": "a request was past its deadline in one world when it was dispatched",
    "time estimates": "the same requests waited, but not the same others beside them",
    "model placed elsewhere": "the model was on another device: see placement",
    "another device": "pressures or free memory differed when the device was chosen",
    "a migration in one world only": "the gain was on the other side of the threshold",
    "an eviction in one world only": "an idle time or need of memory was on the other side",
    "an activation in one world only": "the model was up in the other world",
    "a live action failed": "the live system failed and tried again, the simulator never fails",
    "follows another difference": "the model's state differed already, or that of the queue, which"
    " has not been empty since",
}
"""Class of difference -> what it means."""


class Difference(msgspec.Struct, frozen=True):
    kind: str
    """One of CLASSES."""
    time_s: float
    """Since the replay's start."""
    text: str


class Compared(msgspec.Struct, frozen=True):
    equal: int
    differences: list[Difference]
    notes: dict[str, int] = {}
    """Counts of what was not compared, and the like."""

    @property
    def total(self) -> int:
        return self.equal + len(self.differences)

    @property
    def share(self) -> float | None:
        """Part (0..1) that is equal; None without any decision."""
        return self.equal / self.total if self.total else None

    @property
    def classes(self) -> dict[str, int]:
        """The most frequent first."""
        return dict(Counter(difference.kind for difference in self.differences).most_common())


class Check(msgspec.Struct, frozen=True):
    """Recorded decisions that the same code made again."""

    name: str
    decisions: int
    equal: int
    first: str = ""
    """The first that differs."""


class Figure(msgspec.Struct, frozen=True):
    """One number in both worlds; None where a world has none."""

    group: str
    name: str
    unit: str
    live: float | None
    simulated: float | None

    @property
    def error(self) -> float | None:
        """Simulated / live - 1; for attainments, the difference."""
        if self.live is None or self.simulated is None:
            return None
        if self.unit == "part":
            return self.simulated - self.live
        return self.simulated / self.live - 1 if self.live else None


class RequestLatencies(msgspec.Struct, frozen=True):
    index: int
    model: str
    live_ttft_ms: float | None
    simulated_ttft_ms: float | None
    live_e2e_ms: float | None
    simulated_e2e_ms: float | None


class ParityResults(msgspec.Struct, frozen=True, kw_only=True):
    trace: str
    policy: str
    requests: int
    failed_live: int
    failed_simulated: int
    lead_s: float
    """From the simulation's start, which begins the initial placement, to the trace's zero."""
    cores: float | None
    """That engines of host devices share; None where their steps need none."""
    costs: dict[str, str]
    checks: list[Check]
    compared: dict[str, Compared]
    figures: list[Figure]
    samples: list[RequestLatencies]
    schema: str = SCHEMA
