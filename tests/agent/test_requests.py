"""The table of requests under random events, with a queue that fails and answers late.

No request runs twice or is lost, and the table never contradicts itself.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, cast

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prism.agent.requests.admission import Admission
from prism.agent.requests.arrivals import Arrivals
from prism.agent.requests.queue import OrphanedRequests
from prism.agent.requests.running import RunningRequests
from prism.agent.state.device_state import DeviceState, HostedModel, ModelState
from prism.agent.state.engine_pool import EnginePool, EngineState
from prism.agent.state.request_table import RequestState, RequestTable, TrackedRequest
from prism.errors import QueueUnavailableError
from prism.messages.requests import Chunk, EngineOutput, Request, Resume
from prism.policies.data import EngineView
from prism.scheduler.local_scheduler import LocalScheduler
from tests.agent.harness import model_spec
from tests.agent.in_memory import Event, Frontend, MemoryQueue, OneEngine
from tests.queueing.requests import request

DEVICE = "host:0"
IDS = ("1", "2", "3")
EVENTS = (
    "send",
    "retry",
    "read",
    "replay",
    "cancel",
    "token",
    "output",
    "export",
    "leave",
    "sent",
    "engine lost",
    "stop",
    "gone",
    "hand back",
    "lose data",
    "restore",
)
ONE_EVENT = st.tuples(st.sampled_from(EVENTS), st.integers(0, len(IDS) - 1))


class RequestsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = RequestTable(LocalScheduler(), lambda: 0.0)
        self.state = DeviceState(EnginePool(DEVICE, 1), now_s=lambda: 0.0, requests=self.table)
        self.queue, self.engine = MemoryQueue(), OneEngine()
        self.frontend = Frontend(self.send)
        self.engine.is_on_trial = lambda: any(e.is_on_trial for e in self.table.on_engines())
        self.queue.do = self.do
        self.cursor = ""
        self.frontends = 0  # that have ended
        self.attempts = dict.fromkeys(IDS, 0)
        self.leaving: list[Request] = []  # whose KV is on its way
        self.begin_engine()
        tokens = cast("Any", self.frontend)
        self.running = RunningRequests(
            self.state,
            device=DEVICE,
            engines=cast("Any", self.engine),
            tokens=tokens,
            headroom_tokens=64,
            send_kv=self.send_kv,
        )
        self.arrivals = Arrivals(self.table, self.running, tokens)
        self.orphans = OrphanedRequests(self.state)
        self.admission = Admission(
            self.state,
            views=cast("Any", self.engine),
            reclaimer=cast("Any", None),
            queue=cast("Any", self.queue),
            device=DEVICE,
            running=self.running,
        )

    def begin_engine(self) -> None:
        engine = self.state.pool.create(0.0)
        engine.become(EngineState.ACTIVE, 0.0, "a")
        hosted = HostedModel(model_spec("a"), 0.0, ModelState.ACTIVE, engine_id=engine.id)
        self.state.models.hosted["a"] = hosted

    @property
    def engine_id(self) -> str:
        return self.state.models.hosted["a"].engine_id

    def do(self, event: Event) -> None:
        kind, number = event
        request_id = IDS[number % len(IDS)]
        running = sorted(self.engine.runs)
        run = self.engine.runs[running[number % len(running)]] if running else None
        match kind:
            case "send" if request_id not in self.queue.records:
                self.send(request_id)
            case "retry":
                self.send(request_id)
            case "read":
                self.read(self.cursor)
            case "replay":
                self.arrivals.replayed(self.read(""))
            case "cancel":
                self.frontend.open.pop(request_id, None)
                self.arrivals.cancel([request_id])
            case "token" if run is not None:
                self.token(run)
            case "output" if run is not None:
                self.output(run)
            case "export" if run is not None:
                del self.engine.runs[run.id]
                self.running.moved(self.engine_id, [run])
            case "leave" if run is not None:
                del self.engine.runs[run.id]
                self.leave(run)
            case "sent" if self.leaving:
                self.go_on(self.leaving.pop(number % len(self.leaving)))
            case "engine lost":
                self.lose_engine()
            case "hand back":
                self.orphans.unplace({"a"})
            case "stop":
                self.frontend.open.clear()
                self.arrivals.frontend_died(f"f{self.frontends}")
            case "gone":
                self.frontend.open.clear()
                self.arrivals.frontend_gone(f"f{self.frontends}")
                self.frontends += 1
            case "lose data":
                self.lose_data()
            case "restore":
                self.restore()

    def leave(self, run: Request) -> None:
        """Moves the request's model to another machine, where it resumes when its KV is there."""
        hosted = self.state.models.hosted["a"]
        hosted.kv_target = "host:0@b"
        tracked = self.table.get(run.id)
        assert tracked is not None
        resume = Resume([1] * tracked.produced, "/a/file", 1)
        self.running.moved(self.engine_id, [msgspec.structs.replace(run, resume=resume)])
        hosted.kv_target = ""

    def send_kv(
        self, requests: Sequence[Request], target: str, go_on: Callable[[Request], None]
    ) -> None:
        assert target == "host:0@b"
        self.leaving += requests
        self.go_on = go_on

    def send(self, request_id: str, suspected_at: int | None = None) -> None:
        self.attempts[request_id] += 1
        made = request(request_id, "a", max_tokens=4, frontend_id=f"f{self.frontends}")
        changes = {"attempt": self.attempts[request_id], "suspected_at": suspected_at}
        sent = msgspec.structs.replace(made, **changes)
        self.frontend.open[request_id] = sent
        self.queue.enqueue(sent)

    def read(self, cursor: str) -> set[str]:
        found = [record for record in self.queue.waiting() if record.entry_id > cursor]
        for record in found:
            self.cursor = max(self.cursor, record.entry_id)
            self.arrivals.arrived(record.entry_id, record.request)
        return {record.entry_id for record in found}

    def hand_over(self) -> None:
        """Returns what runs to the queue, output included, as the engine was ordered to."""
        assert self.engine.exporting
        self.engine.exporting = False
        requests = []
        for run in self.engine.runs.values():
            tracked = self.table.get(run.id)
            assert tracked is not None
            resume = Resume([1] * tracked.produced)
            requests.append(msgspec.structs.replace(run, resume=resume))
        self.engine.runs.clear()
        self.running.moved(self.engine_id, requests)

    def lose_data(self) -> None:
        """Empties Redis; the agent finds its epoch gone and writes again what runs."""
        self.queue.records.clear()
        self.table.register()
        self.arrivals.replayed(())

    def restore(self) -> None:
        """Sends the frontend's open requests again."""
        for each in list(self.frontend.open.values()):
            self.queue.enqueue(each)

    def output(self, run: Request) -> None:
        reason = "cancelled" if run.id in self.engine.cancelled else "stop"
        del self.engine.runs[run.id]
        self.engine.ended.add((run.id, run.attempt))
        self.engine.cancelled.discard(run.id)
        chunk = Chunk(run.id, run.attempt, 0, [1], reason)
        self.running.output(self.engine_id, EngineOutput(chunks=[chunk], failures=[]))

    def token(self, run: Request) -> None:
        tracked = self.table.get(run.id)
        assert tracked is not None
        chunk = Chunk(run.id, run.attempt, tracked.produced, [1])
        self.running.output(self.engine_id, EngineOutput(chunks=[chunk]))

    def lose_engine(self) -> None:
        gone = self.engine_id
        self.engine.runs.clear()
        self.engine.cancelled.clear()
        self.state.pool.remove(gone)
        self.begin_engine()
        self.running.engine_lost(gone, "it was killed")

    @rule(event=ONE_EVENT)
    def happen(self, event: Event) -> None:
        self.do(event)

    @rule(
        fails=st.sampled_from(["", "", "", "before", "after"]),
        meanwhile=st.lists(st.lists(ONE_EVENT, max_size=4), max_size=4),
    )
    def turn(self, fails: str = "", meanwhile: Sequence[list[Event]] = ()) -> None:
        self.queue.fails, self.queue.meanwhile = fails, list(meanwhile)
        with suppress(QueueUnavailableError):
            finished(self.admission.step(1))
        self.queue.fails, self.queue.meanwhile = "", []

    @invariant()
    def the_table_agrees_with_itself_and_with_the_engine(self) -> None:
        assert self.table.check_integrity({self.engine_id}) == []
        running = [each for each in self.table.on_engines() if each.is_on_engine]
        assert {each.id for each in running} == set(self.engine.runs)
        between = {e.id for e in self.table.on_engines() if e.state is RequestState.LEAVING}
        assert between <= {each.id for each in self.leaving}
        assert len(running) == 1 or not any(each.is_on_trial for each in running)

    def teardown(self) -> None:
        """Ends all open requests; Redis has none afterwards."""
        self.restore()
        while self.leaving:
            self.go_on(self.leaving.pop())
        for _ in range(4 * len(IDS)):
            self.arrivals.replayed(self.read(""))
            finished(self.admission.step(1))
            self.the_table_agrees_with_itself_and_with_the_engine()
            for run in list(self.engine.runs.values()):
                self.output(run)
        finished(self.admission.step(1))
        assert self.queue.records == {}
        assert self.table.frontends() == set()
        assert self.frontend.open == {}


def finished(turn: Coroutine[Any, Any, None]) -> None:
    """Runs the coroutine to its end: the queue's calls suspend nothing."""
    with suppress(StopIteration):
        turn.send(None)
        raise AssertionError("it waits for something")


TestRequests = RequestsMachine.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def started(*events: Event) -> RequestsMachine:
    """Returns a machine in which request "1" runs, after these events."""
    machine = RequestsMachine()
    for event in (("send", 0), ("read", 0)):
        machine.do(event)
    machine.turn()
    assert list(machine.engine.runs) == ["1"]
    for event in events:
        machine.do(event)
    return machine


def test_an_end_that_redis_does_not_know_of_holds_the_next_attempt_back() -> None:
    """Ends the first attempt, and starts the second, during another call to Redis.

    The acknowledgement of the first must not reach Redis while the second runs.
    """
    machine = started(("send", 1), ("read", 0), ("cancel", 1))
    machine.turn(meanwhile=[[("output", 0), ("retry", 0), ("read", 0)]])
    assert machine.engine.runs == {}
    machine.turn()
    assert list(machine.engine.runs) == ["1"]
    machine.turn()
    assert machine.queue.records["1"].runs
    machine.teardown()


def test_a_newer_attempt_needs_no_acknowledgement_of_the_older() -> None:
    machine = started(("retry", 0), ("read", 0))
    machine.turn(meanwhile=[])
    machine.do(("output", 0))
    machine.turn()
    assert machine.queue.records["1"].runs
    machine.turn()
    machine.teardown()


def test_a_cancelled_retry_leaves_redis_too() -> None:
    """Covers a frontend that could not take it out of the queue itself."""
    machine = started(("retry", 0), ("read", 0), ("cancel", 0), ("output", 0))
    for _ in range(3):
        machine.do(("read", 0))
        machine.turn()
    assert machine.queue.records == {}
    assert machine.engine.runs == {}
    machine.teardown()


def test_what_leaves_runs_for_redis_until_its_kv_is_there() -> None:
    """Reports no failure if its engine dies meanwhile or serves another model."""
    machine = started(("leave", 0), ("engine lost", 0), ("read", 0))
    machine.turn()
    assert machine.queue.records["1"].runs
    assert not machine.frontend.deaths.total()
    assert not machine.table.none_runs.is_set()
    machine.do(("sent", 0))
    machine.turn()
    assert machine.table.none_runs.is_set()
    assert [record.request.id for record in machine.queue.waiting()] == ["1"]
    machine.do(("read", 0))
    machine.turn()
    assert machine.engine.runs["1"].resume.kv_path == "/a/file"  # type: ignore[union-attr]
    machine.teardown()


def test_an_attempt_that_a_newer_one_replaces_is_not_registered_again() -> None:
    """Redis would keep it as running for ever, since its end is not reported."""
    machine = started(("retry", 0), ("read", 0), ("stop", 0), ("lose data", 0))
    machine.teardown()


@pytest.mark.parametrize("event", ["cancel", "stop", "gone", "retry"])
def test_what_ends_while_it_leaves_does_not_go_on(event: str) -> None:
    machine = started(("leave", 0), (event, 0), ("read", 0))
    assert "1" not in machine.table.running_ids()
    machine.do(("sent", 0))
    machine.turn()
    machine.turn()
    assert {each.attempt for each in machine.engine.runs.values()} <= {2}
    assert bool(machine.engine.runs) is (event == "retry")
    machine.teardown()


def test_a_contradiction_is_logged() -> None:
    table = RequestTable(LocalScheduler(), lambda: 0.0)
    table.wait(TrackedRequest(request("1"), "1-1"))
    table.start(TrackedRequest(request("2")), "gone", 16)
    assert table.check_integrity({"gone"}) == []
    table.get("1").cancelled = True  # type: ignore[union-attr]
    _, admitting = table.plan(0.0, [EngineView("a", 1000, 0, 2, 16, 1e6)])
    assert [each.id for each in admitting] == ["1"]
    assert table.check_integrity(()) == [
        "1 (admitting): its admission was never completed",
        "2 (running): its engine 'gone' is gone",
    ]
