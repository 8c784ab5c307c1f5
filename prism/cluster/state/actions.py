"""Actions in progress, and the record of actions for operators."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from prism import clock
from prism.messages.cluster import Decision
from prism.policies.data import Action, ClusterView, Refuse
from prism.scheduler.decision_journal import Ended, Planned, Refused, Sink, Started, fields_of

LATEST_MAX = 32


@dataclass(frozen=True, slots=True)
class Move:
    """Action in progress."""

    # "activate" (on device), "evict" (from device), "migrate" (from source to device), or
    # "drop_copy" (evicts a second copy from device; source keeps serving).
    kind: str
    model: str
    device: str  # of rank 0
    source: str | None = None
    # Devices of the other ranks, and of copies that are evicted by the same action.
    peers: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device, *self.peers)

    @property
    def routes(self) -> frozenset[str]:
        """Devices that the action itself adds to the route or removes from it."""
        source = (self.source,) if self.kind == "migrate" and self.source else ()
        return frozenset((*self.devices, *source))

    @property
    def brings_up(self) -> bool:
        return self.kind in ("activate", "migrate")

    @property
    def source_and_target(self) -> tuple[str, str]:
        """(device, target) in the journal's terms; target is "" unless this is a migration."""
        if self.kind == "migrate":
            return self.source or "", self.device
        return self.device, ""


class Actions:
    """Actions in progress, totals, and the latest actions with their reasons.

    The actuator begins and ends them.

    Args:
        now_s: the scheduler's clock.
        journal: receives each action, and plans if it keeps inputs. None: no journal is written.
    """

    def __init__(self, now_s: Callable[[], float], journal: Sink | None) -> None:
        self.moves: dict[str, Move] = {}  # in progress, by model
        self.totals: Counter[str] = Counter()
        self._now_s = now_s
        self._journal = journal
        self._latest: dict[int, Decision] = {}
        self._numbers = itertools.count()

    def begin(self, move: Move, reason: str) -> int:
        """Adds an action. Returns its number, for `end`."""
        self._note(Started, move, reason=reason)
        self.moves[move.model] = move
        number, ends = next(self._numbers), move.source_and_target
        self._latest[number] = Decision(clock.unix_s(), move.kind, move.model, *ends, reason)
        if len(self._latest) > LATEST_MAX:
            del self._latest[next(iter(self._latest))]
        return number

    def end(self, number: int, move: Move, problem: str) -> None:
        self._note(Ended, move, problem=problem)
        del self.moves[move.model]
        if (began := self._latest.get(number)) is not None:
            seconds = max(0.0, clock.unix_s() - began.time_unix_s)
            ended = msgspec.structs.replace(began, problem=problem, seconds=seconds)
            self._latest[number] = ended

    def refuse(self, action: Refuse) -> None:
        self.totals["refuse"] += 1
        if self._journal is not None:
            now_s = self._now_s()
            refused = Refused(
                time_s=now_s, model=action.model, reason=action.reason, overload=action.overload
            )
            self._journal.add(refused)

    def note_plan(self, view: ClusterView, actions: tuple[Action, ...]) -> None:
        if self._journal is not None and self._journal.inputs:
            plan = Planned(time_s=view.now_s, view=view, actions=fields_of(actions))
            self._journal.add(plan)

    def latest(self) -> list[Decision]:
        """Returns the latest actions in the order in which they began."""
        return list(self._latest.values())

    def _note(self, record: type[Started] | type[Ended], move: Move, **fields: str) -> None:
        if self._journal is not None:
            device, target = move.source_and_target
            now_s, kind, model = self._now_s(), move.kind, move.model
            self._journal.add(
                record(time_s=now_s, kind=kind, model=model, device=device, target=target, **fields)
            )
