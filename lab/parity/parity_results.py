"""The results file of a comparison, schema "prism-parity/1"."""

from __future__ import annotations

from collections import Counter

import msgspec

SCHEMA = "prism-parity/1"

CLASSES = {
    "activation timing": "a model was active in one world and still being activated in the other",
    "running slots": "an engine ran its maximum number of requests, in one world",
    "prefill in flight": "an engine already had a full step of prefill work, in one world",
    "KV limit": "a model's KV limit was reached, in one world",
    "free memory": "there was not enough KV memory for a request, in one world",
    "arrival order": "concurrent requests reached the queue in the reverse order",
    "moment of the choice": "a slot became free earlier in one world; at the simulated time, the"
    " live scheduler makes the simulated choice",
    "prefill speeds": "engines had measured different speeds; with the simulated speeds, the"
    " live scheduler makes the simulated choice",
    "moment and speeds": "neither alone, but both together cause the simulated choice",
    "lateness": "a request was past its deadline in one world when it was dispatched",
    "time estimates": "both requests waited in both worlds, but with different other requests",
    "model placed elsewhere": "the model was on another device; see placement",
    "another device": "pressure or free memory differed when the device was chosen",
    "a migration in one world only": "the gain was on the other side of the threshold",
    "an eviction in one world only": "idle time or memory need was beyond the threshold",
    "an activation in one world only": "the model was already active in the other world",
    "a live action failed": "the live system failed and retried; the simulator never fails",
    "follows another difference": "the state of the model, or of the queue since it was last empty,"
    " differed already",
}
"""Class of difference -> its meaning."""


class Difference(msgspec.Struct, frozen=True):
    kind: str
    """One of CLASSES."""
    time_s: float
    """Time since the replay's start."""
    text: str


class Compared(msgspec.Struct, frozen=True):
    equal: int
    differences: list[Difference]
    notes: dict[str, int] = {}
    """Text -> number, such as counts of decisions that were not compared."""

    @property
    def total(self) -> int:
        return self.equal + len(self.differences)

    @property
    def share(self) -> float | None:
        """Fraction (0..1) of equal decisions; None without decisions."""
        return self.equal / self.total if self.total else None

    @property
    def classes(self) -> dict[str, int]:
        """Class -> number of differences, the most frequent first."""
        return dict(Counter(difference.kind for difference in self.differences).most_common())


class Check(msgspec.Struct, frozen=True):
    """Result of repeating recorded decisions with the same code."""

    name: str
    decisions: int
    equal: int
    first: str = ""
    """Description of the first decision that differs."""


class Figure(msgspec.Struct, frozen=True):
    """One figure in both worlds; None if a world does not have it."""

    group: str
    name: str
    unit: str
    """Unit of the values; "part" for a fraction (0..1)."""
    live: float | None
    simulated: float | None

    @property
    def error(self) -> float | None:
        """Relative error, simulated / live - 1; for fractions, the difference."""
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
    """Time from the simulation's start with the initial placement to the trace's zero."""
    cores: float | None
    """Number of cores that engines of host devices share; None if their steps use no core."""
    costs: dict[str, str]
    """Model -> source of its cost table."""
    checks: list[Check]
    compared: dict[str, Compared]
    figures: list[Figure]
    samples: list[RequestLatencies]
    schema: str = SCHEMA
