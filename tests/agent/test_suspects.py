"""The poison rule (see `RequestTable`): a request that kills engines ends, and no other one."""

from __future__ import annotations

import msgspec

from prism.messages.requests import Chunk, EngineOutput, Resume
from tests.agent.test_lifecycle import TIMING, Bench
from tests.agent.test_requests import RequestsMachine, started


def test_suspects_run_one_at_a_time_and_the_guilty_one_ends() -> None:
    """Tries both, which died with their engine: the engine survives the first, not the second."""
    machine = started(("send", 1), ("read", 0))
    machine.turn()
    assert sorted(machine.engine.runs) == ["1", "2"]
    machine.do(("engine lost", 0))
    machine.do(("read", 0))
    machine.turn()
    machine.turn()
    assert list(machine.engine.runs) == ["1"]
    one_token(machine, "1", 2)
    give_way(machine)
    assert list(machine.engine.runs) == ["2"]
    machine.do(("engine lost", 0))
    assert sorted(machine.frontend.open) == ["1"]
    machine.teardown()


def one_token(machine: RequestsMachine, request_id: str, attempt: int) -> None:
    chunk = Chunk(request_id, attempt, 0, [1])
    machine.running.output(machine.engine_id, EngineOutput(chunks=[chunk]))


def give_way(machine: RequestsMachine) -> None:
    """Preempts what runs in favour of a suspect that waits."""
    machine.turn()
    machine.hand_over()
    machine.turn()
    machine.do(("read", 0))
    machine.turn()


def test_a_cleared_suspect_is_on_no_engine_on_which_another_is_tried() -> None:
    """Excludes it, because it may have killed the first engine and would kill the second."""
    machine = started(("send", 1), ("read", 0))
    machine.turn()
    machine.do(("engine lost", 0))
    machine.do(("read", 0))
    machine.turn()
    one_token(machine, "1", 2)
    machine.turn()
    assert list(machine.engine.runs) == ["1"]
    machine.do(("engine lost", 0))
    assert {i: each.suspected_at for i, each in machine.frontend.open.items()} == {"1": 1, "2": 0}
    machine.teardown()


def test_what_runs_makes_way_for_a_suspect_of_another_engine() -> None:
    machine = started()
    machine.send("2", suspected_at=0)
    machine.do(("read", 0))
    give_way(machine)
    assert list(machine.engine.runs) == ["2"]
    one_token(machine, "2", 1)
    machine.turn()
    assert sorted(machine.engine.runs) == ["1", "2"]
    assert not machine.engine.exporting
    machine.teardown()


def test_a_request_that_makes_way_is_asked_for_once() -> None:
    machine = started()
    machine.send("2", suspected_at=0)
    machine.do(("read", 0))
    machine.turn()
    assert machine.engine.exporting
    machine.engine.exporting = False
    machine.turn()
    assert not machine.engine.exporting
    machine.teardown()


def test_a_cleared_request_is_no_suspect_where_it_goes_on() -> None:
    machine = started()
    machine.send("2", suspected_at=0)
    sent = machine.queue.records["2"]
    sent.request = msgspec.structs.replace(sent.request, resume=Resume([1]))
    machine.do(("read", 0))
    machine.turn()
    assert sorted(machine.engine.runs) == ["1", "2"]
    machine.teardown()


def test_a_newer_attempt_of_a_guilty_request_ends_with_it() -> None:
    machine = started(("engine lost", 0), ("read", 0))
    machine.turn()
    machine.turn()
    assert machine.engine.runs["1"].suspected_at == 0
    machine.send("1", suspected_at=0)
    machine.do(("read", 0))
    machine.do(("engine lost", 0))
    assert machine.frontend.open == {}
    machine.do(("read", 0))
    machine.turn()
    machine.turn()
    assert machine.engine.runs == {}
    assert machine.queue.records == {}
    machine.teardown()


def test_a_death_that_has_another_cause_makes_no_suspects() -> None:
    machine = started()
    machine.running.engine_lost(machine.engine_id, "it was replaced", by_request=False)
    assert machine.frontend.open["1"].suspected_at is None
    machine.engine.runs.clear()
    machine.teardown()


def test_no_verdict_is_spoken_over_two() -> None:
    """Covers a second request that ran with the suspect, for whatever reason."""
    machine = started(("send", 1), ("read", 0))
    machine.turn()
    suspect = machine.table.get("1")
    assert suspect is not None
    suspect.request = msgspec.structs.replace(suspect.request, suspected_at=0)
    machine.do(("engine lost", 0))
    assert [each.suspected_at for each in machine.frontend.open.values()] == [0, 0]
    machine.teardown()


def test_only_a_death_that_made_suspects_is_taken_back() -> None:
    """Covers a death by a request, a replacement for another reason, and the request's trial."""
    bench = Bench()
    bench.serve("a")
    for n, (by_request, blames) in enumerate([(True, False), (False, False), (True, True)]):
        bench.time_s = float(n)
        engine = bench.engine("a")
        bench.effects.blames, bench.effects.load[engine.id] = blames, 1
        bench.lifecycle.engine_died(engine.id, "killed", by_request)
        bench.fill()
        bench.lifecycle.tick()
        bench.succeed("a")
    assert bench.state.models.hosted["a"].deaths_s == [1.0]


def test_deaths_that_a_request_is_to_blame_for_do_not_count() -> None:
    bench = Bench()
    bench.serve("a")
    for death in range(2 * (TIMING.revives_max + 2)):
        bench.effects.blames = death % 2 == 1
        bench.effects.load[bench.engine("a").id] = 1
        bench.lifecycle.engine_died(bench.engine("a").id, "killed")
        bench.fill()
        bench.lifecycle.tick()
        bench.succeed("a")
    assert bench.stage("a") == "active"
