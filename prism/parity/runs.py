"""What happened in either world, in the same terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prism.errors import ConfigError
from prism.journal import AnyRecord, Ended, Left, Queued, Started, Stepped
from prism.parity.journals import Dated, Journals
from prism.replay.results import Results
from prism.sim.world import World

PLACED = ("activate", "evict", "migrate")


@dataclass(frozen=True, slots=True)
class Placement:
    """An action of the cluster scheduler. time_s: since the replay's start; before it, negative.
    problem: why it failed, where it did."""

    time_s: float
    kind: str
    model: str
    device: str
    target: str = ""
    reason: str = ""
    problem: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.device, self.target

    def __str__(self) -> str:
        to = f" to {self.target}" if self.target else ""
        return f"{self.kind} {self.model} on {self.device}{to} at {self.time_s:.2f} s"


@dataclass(frozen=True, slots=True)
class Wait:
    """A request's stay in a device's queue, up to its dispatch.

    queued, dispatched: positions among the queue's records; rank: of the dispatch among all of the
    device. id: in the queue. blocked: model -> why its first request could not start in the same
    step.
    """

    request: int
    model: str
    device: str
    queued: int
    dispatched: int
    rank: int
    queued_s: float
    dispatched_s: float
    deadline_s: float
    id: str = ""
    blocked: Mapping[str, str] = field(default_factory=dict)

    def beside(self, other: Wait) -> bool:
        """Both waited at the same time on the same device."""
        return (
            self.device == other.device
            and self.queued < other.dispatched
            and other.queued < self.dispatched
        )

    @property
    def is_late(self) -> bool:
        return self.dispatched_s > self.deadline_s


@dataclass(frozen=True, slots=True)
class Run:
    """waits: request -> its last stay that ended with a dispatch."""

    placements: tuple[Placement, ...]
    waits: Mapping[int, Wait]


def live_run(journals: Journals, results: Results) -> Run:
    """Raises ConfigError when the results are not of that cluster."""
    start_s = results.config.started_unix_s
    index_of = {
        f"{record.response_id}-0": record.index
        for record in results.records
        if record.response_id is not None
    }
    if not index_of:
        raise ConfigError(
            "--results: no request has the server's id; replay with this version's prism-replay"
        )
    waits: dict[int, Wait] = {}
    for device, records in journals.agents.items():
        dated = ((d.unix_s - start_s, d.ahead_s - start_s, d.record) for d in records)
        for wait in waits_of(device, dated, index_of.get):
            if wait.request not in waits or waits[wait.request].queued_s < wait.queued_s:
                waits[wait.request] = wait
    if not waits:
        raise ConfigError(
            "--journal: no request of --results is in it; name the journal of the same replay"
        )
    return Run(tuple(_live_placements(journals.cluster, start_s)), waits)


def simulated_run(world: World, lead_s: float) -> Run:
    """lead_s: by how much the simulation's arrivals are later than the trace's. REQUIRES: `world`
    has run and kept its queues."""
    placements = tuple(
        Placement(d.time_s - lead_s, d.kind, d.model, d.device, d.target, d.reason)
        for d in world.records.decisions
        if d.kind in PLACED
    )
    waits: dict[int, Wait] = {}
    for device, memory in world.queues.items():
        dated = ((record.time_s - lead_s, -lead_s, record) for record in memory.records)
        for wait in waits_of(device, dated, int):
            if wait.request not in waits or waits[wait.request].queued_s < wait.queued_s:
                waits[wait.request] = wait
    return Run(placements, waits)


def waits_of(
    device: str,
    records: Iterable[tuple[float, float, AnyRecord]],
    index_of: Callable[[str], int | None],
) -> Iterable[Wait]:
    """records: (time, what its own clock is behind that time, record). index_of: None for a
    request that is none of the trace's."""
    queued: dict[str, tuple[int, float, float, Queued]] = {}
    rank = 0
    for position, (time_s, ahead_s, record) in enumerate(records):
        if isinstance(record, Queued):
            queued[record.id] = (position, time_s, ahead_s, record)
        elif isinstance(record, Left):
            for request_id in record.ids:
                queued.pop(request_id, None)
        elif isinstance(record, Stepped):
            for request_id in record.ids:
                since, since_s, shift_s, request = queued.pop(request_id)
                rank += 1
                index = index_of(request_id)
                if index is not None:
                    yield Wait(
                        request=index,
                        model=request.model,
                        device=device,
                        queued=since,
                        dispatched=position,
                        rank=rank,
                        queued_s=since_s,
                        dispatched_s=time_s,
                        deadline_s=request.deadline_s + shift_s,
                        id=request_id,
                        blocked=record.blocked,
                    )


def _live_placements(records: Iterable[Dated], start_s: float) -> Iterable[Placement]:
    open_: dict[str, Placement] = {}
    found: list[Placement] = []
    for dated in records:
        record, time_s = dated.record, dated.unix_s - start_s
        if isinstance(record, Started) and record.kind in PLACED:
            open_[record.model] = Placement(
                time_s, record.kind, record.model, record.device, record.target, record.reason
            )
            found.append(open_[record.model])
        elif isinstance(record, Ended) and record.problem and record.model in open_:
            failed = open_.pop(record.model)
            found[found.index(failed)] = Placement(
                failed.time_s, *_named(failed), problem=record.problem
            )
    return found


def _named(placement: Placement) -> tuple[str, str, str, str, str]:
    return (
        placement.kind,
        placement.model,
        placement.device,
        placement.target,
        placement.reason,
    )
