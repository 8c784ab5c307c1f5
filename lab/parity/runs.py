"""Decisions of the live system and the simulator, converted to the same types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from lab.parity.journals import Dated, Journals
from prism.errors import ConfigError
from prism.scheduler.decision_journal import AnyRecord, Ended, Left, Queued, Started, Stepped
from prism_replay.results import ReplayResults
from prism_sim.cluster.world import World

PLACED = ("activate", "evict", "migrate")


@dataclass(frozen=True, slots=True)
class Placed:
    """Action of the cluster scheduler."""

    time_s: float
    """Time since the replay's start; negative before it."""
    kind: str
    model: str
    device: str
    target: str = ""
    reason: str = ""
    problem: str = ""
    """Error of a failed action."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.device, self.target

    def __str__(self) -> str:
        to = f" to {self.target}" if self.target else ""
        return f"{self.kind} {self.model} on {self.device}{to} at {self.time_s:.2f} s"


@dataclass(frozen=True, slots=True)
class Wait:
    """Stay of a request in a device's queue, until its dispatch."""

    request: int
    model: str
    device: str
    queued: int
    """Position of its arrival among the queue's records."""
    dispatched: int
    """Position of its dispatch among the queue's records."""
    rank: int
    """Rank of its dispatch among all dispatches of the device."""
    queued_s: float
    dispatched_s: float
    deadline_s: float
    id: str = ""
    """Id of the request in the queue."""
    blocked: Mapping[str, str] = field(default_factory=dict)
    """Model -> reason why its first request could not start in the same step."""

    def overlaps(self, other: Wait) -> bool:
        """Returns whether both waited at the same time on the same device."""
        return (
            self.device == other.device
            and self.queued < other.dispatched
            and other.queued < self.dispatched
        )

    @property
    def is_late(self) -> bool:
        return self.dispatched_s > self.deadline_s


@dataclass(frozen=True, slots=True)
class History:
    """Decisions of the schedulers of one world."""

    placements: tuple[Placed, ...]
    waits: Mapping[int, Wait]
    """Request -> its last stay in a queue that ended with a dispatch."""


def live_run(journals: Journals, results: ReplayResults) -> History:
    """Returns the history of the live system. Raises ConfigError if the files do not match."""
    start_s = results.config.started_unix_s
    index_of = {
        f"{record.response_id}-0": record.index
        for record in results.records
        if record.response_id is not None
    }
    if not index_of:
        raise ConfigError(
            "--results: no request has a response id; replay with this version of prism-replay"
        )
    waits = _last_waits(
        wait
        for device, records in journals.agents.items()
        for wait in waits_of(
            device,
            ((d.unix_s - start_s, d.ahead_s - start_s, d.record) for d in records),
            index_of.get,
        )
    )
    if not waits:
        raise ConfigError(
            "--journal: does not have a request of --results; give the journal of the same replay"
        )
    end_s = _last_answer_s(results)
    placements = _live_placements(journals.cluster, start_s)
    return History(tuple(p for p in placements if p.time_s <= end_s), waits)


def _last_answer_s(results: ReplayResults) -> float:
    """Returns the time of the last response since the replay's start.

    The simulation ends there. Later decisions of the live cluster have no counterpart.
    """
    ends_s = [r.arrival_s + r.e2e_ms / 1000 for r in results.records if r.e2e_ms is not None]
    return max(ends_s) if len(ends_s) == len(results.records) else inf


def simulated_run(world: World, lead_s: float) -> History:
    """Returns the history of the simulator. REQUIRES: `world` has run with keep_queues.

    Args:
        lead_s: Time by which the simulation's arrivals are later than the trace's.
    """
    placements = tuple(
        Placed(d.time_s - lead_s, d.kind, d.model, d.device, d.target, d.reason)
        for d in world.records.decisions
        if d.kind in PLACED
    )
    if world.policy.turns is not None:
        return History(placements, dict(_turns_waits(world)))
    waits = _last_waits(
        wait
        for device, memory in world.queues.items()
        for wait in waits_of(device, ((r.time_s - lead_s, -lead_s, r) for r in memory.records), int)
    )
    return History(placements, waits)


def _turns_waits(world: World) -> Iterable[tuple[int, Wait]]:
    """Yields (request, its stay on the instance where it ended). With turns, no order of a device's
    queue decides, so places and times are left out."""
    for index, device in enumerate(world.records.device):
        if device >= 0:
            model = world.work.models[world.work.model[index]]
            name = world.devices[device].name
            yield index, Wait(index, model, name, 0, 0, 0, 0.0, 0.0, inf)


def _last_waits(waits: Iterable[Wait]) -> dict[int, Wait]:
    """Returns request -> the last of its stays."""
    return {wait.request: wait for wait in sorted(waits, key=lambda wait: wait.queued_s)}


def waits_of(
    device: str,
    records: Iterable[tuple[float, float, AnyRecord]],
    index_of: Callable[[str], int | None],
) -> Iterable[Wait]:
    """Yields the stays in a device's queue that ended with a dispatch.

    Args:
        records: (time, that time minus the time on the record's own clock, record).
        index_of: Returns the index of a request by its id, None if it is not of the trace.
    """
    queued: dict[str, tuple[int, float, float, Queued]] = {}
    rank = 0
    for position, (time_s, ahead_s, record) in enumerate(records):
        if isinstance(record, Queued):
            queued[record.id] = (position, time_s, ahead_s, record)
        elif isinstance(record, Left):
            for request_id in record.ids:
                queued.pop(request_id, None)
        elif isinstance(record, Stepped):
            # Step control dispatches a request again that was retracted.
            for request_id in [i for i in record.ids if i in queued]:
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


def _live_placements(records: Iterable[Dated], start_s: float) -> Iterable[Placed]:
    open_: dict[str, Placed] = {}
    found: list[Placed] = []
    for dated in records:
        record, time_s = dated.record, dated.unix_s - start_s
        if isinstance(record, Started) and record.kind in PLACED:
            open_[record.model] = Placed(
                time_s, record.kind, record.model, record.device, record.target, record.reason
            )
            found.append(open_[record.model])
        elif isinstance(record, Ended) and record.problem and record.model in open_:
            failed = open_.pop(record.model)
            found[found.index(failed)] = replace(failed, problem=record.problem)
    return found
