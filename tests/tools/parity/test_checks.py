"""Recorded decisions made again: equal by construction, and seen when they are not."""

from __future__ import annotations

import msgspec
import pytest

from lab.parity.checks import check_plans, check_queue
from lab.parity.journals import Dated
from prism.policies import registry
from prism.policies.data import ClusterView, EngineView, GpuView, ModelView, Settings, Waiting
from prism.scheduler.decision_journal import (
    MemoryJournal,
    Opened,
    Planned,
    QueueJournal,
    Stepped,
    fields_of,
)
from prism.scheduler.local_scheduler import AdmissionPlan, Limits, LocalScheduler

LIMITS = Limits(headroom_tokens=16, passes_max=2)
OPENED = Opened(time_s=0.0, unix_s=0.0, source="host:0", policy="prism", limits=LIMITS)
PRISM = registry.get("prism")


def waiting(number: int) -> Waiting:
    model = "ab"[number % 2]
    return Waiting(f"r{number}", model, 40 + number, 20, number * 0.1, number * 0.1 + 0.5)


def views(room: int) -> list[EngineView]:
    return [EngineView(m, room, 0, 2, 16, 500.0, shared_tokens=room) for m in "ab"]


def driven(scheduler: LocalScheduler) -> list[AdmissionPlan]:
    """Returns the plans for a queue under changing memory, with a cancellation."""
    steps = []
    for number in range(30):
        scheduler.add(waiting(number))
        if number == 7:
            scheduler.remove(["r6", "unknown"])
        steps.append(scheduler.step(number * 0.1, views((number * 37) % 200)))
    return steps


def tape(inputs: bool = True) -> list[Dated]:
    journal = MemoryJournal(inputs)
    driven(LocalScheduler(LIMITS, PRISM.order, QueueJournal(journal, lambda: 0.0)))
    return [Dated(r.time_s, 0.0, r) for r in (OPENED, *journal.records)]


def test_a_journal_changes_no_decision() -> None:
    journal = QueueJournal(MemoryJournal(True), lambda: 0.0)
    plain = LocalScheduler(LIMITS, PRISM.order)
    assert driven(LocalScheduler(LIMITS, PRISM.order, journal)) == driven(plain)


def test_every_step_comes_out_the_same_again() -> None:
    found = check_queue("host:0", tuple(tape()), PRISM)
    assert found.decisions > 20
    assert found.equal == found.decisions
    assert found.first == ""


def test_a_step_that_was_another_one_is_found() -> None:
    records = tape()
    place = next(i for i, d in enumerate(records) if isinstance(d.record, Stepped) and d.record.ids)
    wrong = msgspec.structs.replace(records[place].record, ids=("r29",))
    records[place] = records[place]._replace(record=wrong)
    found = check_queue("host:0", tuple(records), PRISM)
    assert found.equal < found.decisions
    assert "r29" in found.first


def test_without_inputs_there_is_nothing_to_check() -> None:
    records = tape(inputs=False)
    assert any(isinstance(d.record, Stepped) for d in records)
    assert check_queue("host:0", tuple(records), PRISM).decisions == 0


@pytest.mark.parametrize("same", [True, False])
def test_plans_are_made_again(same: bool) -> None:
    """Compares plans after a round trip through JSON, as in a file."""
    model = ModelView("a", 10, 1, 5, 1.0, 0.1, waiting=1, idle_s=3.0)
    view = ClusterView(5.0, (model,), (GpuView("host:0", 100, 0, 100, 1, 1),))
    actions = fields_of(PRISM.plan(view, Settings()) if same else ())
    opened = Opened(time_s=0.0, unix_s=0.0, source="c", policy="prism", settings=Settings())
    written = msgspec.json.encode(Planned(time_s=5.0, view=view, actions=actions))
    again = msgspec.json.decode(written, type=Planned)
    found = check_plans((Dated(0.0, 0.0, opened), Dated(5.0, 0.0, again)), PRISM)
    assert (found.decisions, found.equal) == (1, int(same))
    assert same or "activate" in found.first
