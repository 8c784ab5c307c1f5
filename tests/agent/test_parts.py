"""The agent's small parts: memory as admission sees it, delivery, orphans, counts."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

import kvcached
from prism.agent.engines.fork_supervisor import ForkServerSupervisor
from prism.agent.inbox import EngineInbox
from prism.agent.network import sockets
from prism.agent.network.sockets import OutputBatch, TokenSender
from prism.agent.requests.queue import OrphanedRequests
from prism.agent.state.device_state import ModelState, ModelTotals
from prism.agent.state.request_table import RequestTable, TrackedRequest
from prism.messages.engine import EngineStatus
from prism.messages.forking import EngineForked
from prism.messages.requests import Chunk, EngineOutput
from prism.scheduler.local_scheduler import LocalScheduler
from prism.transport import malformed_total
from tests.agent.bench import QUANTUM, QUANTUM_TOKENS, Bench
from tests.agent.harness import make_config
from tests.queueing.requests import request


def test_free_room_is_shared_and_guaranteed_room_is_not(bench: Bench) -> None:
    assert bench.quanta("a") == bench.quanta("b") == (10, 80)
    lease = bench.clients["b"].reserve_static(60 * QUANTUM, "weights")
    assert bench.quanta("a") == (10, 20)
    lease.release()


def test_idle_memory_is_the_engines_own(bench: Bench) -> None:
    bench.observe("a", free=32, evictable=16)
    assert bench.quanta("a") == (13, 80)


def test_what_was_submitted_counts_until_a_status_shows_it(bench: Bench) -> None:
    """Submits 12 quanta to "a": its own ten, and two of the room that "b" sees as well."""
    run = bench.run("a", need_tokens=12 * QUANTUM_TOKENS)
    assert bench.quanta("a") == (0, 78)
    assert bench.quanta("b") == (10, 78)
    take_status = inbox_of(bench)._take_status
    take_status(bench.engine("a"), EngineStatus(run.engine_id, "a"))  # sent before the first token
    run.prefilled = True
    assert bench.quanta("a") == (0, 78)
    take_status(bench.engine("a"), EngineStatus(run.engine_id, "a"))
    assert bench.quanta("a") == (10, 80)


def test_what_engines_drop_is_counted_once(bench: Bench) -> None:
    take_status, engine = inbox_of(bench)._take_status, bench.engine("a")
    before = malformed_total()
    for total in (0, 2, 2, 0, 3):  # the last status about a model has none
        take_status(engine, EngineStatus(engine.id, "a", malformed_total=total))
    assert malformed_total() - before == 3


def inbox_of(bench: Bench) -> EngineInbox:
    unused: Any = None
    return EngineInbox(bench.state, unused, unused, unused, lambda: None)


def test_requests_use_up_the_guarantee_before_anything_else(bench: Bench) -> None:
    def left() -> list[float]:
        return [view.guaranteed_tokens / QUANTUM_TOKENS for view in bench.views.read()]

    assert left() == [10, 10]
    run = bench.run("a", need_tokens=4 * QUANTUM_TOKENS)
    assert left() == [6, 10]
    run.need_tokens = 0
    kv = bench.clients["a"].alloc_kvcache(
        kvcached.Layout(2, 2, 32, dtype="float32"), 1024, reserved_blocks=0
    )
    assert kv.alloc_kv(4) is not None
    quanta = bench.clients["a"].usage().reserved_bytes / QUANTUM
    assert left() == [10 - quanta, 10]
    bench.observe("a", evictable=16)  # one of them is cache by now
    assert left() == [11 - quanta, 10]
    bench.clients["a"].free_kvcache(kv)


def test_a_limit_bounds_the_shared_part(bench: Bench) -> None:
    bench.clients["a"].set_limit(15 * QUANTUM)
    assert bench.quanta("a") == (10, 5)
    assert bench.quanta("b") == (10, 80)


def test_what_was_submitted_counts_against_a_limit(bench: Bench) -> None:
    """Submits 13 quanta, ten of them guaranteed: two of the limit's fifteen are left."""
    bench.clients["a"].set_limit(15 * QUANTUM)
    bench.run("a", need_tokens=13 * QUANTUM_TOKENS)
    assert bench.quanta("a") == (0, 2)
    assert bench.quanta("b") == (10, 77)


def test_models_on_their_way_are_shown_with_what_their_activation_still_takes(
    bench: Bench,
) -> None:
    hosted = bench.state.models.hosted["a"]
    hosted.state, hosted.since_s, hosted.activation_s = ModelState.ACTIVATING, 0.0, 4.0
    bench.time_s = 1.0
    assert [v.ready_in_s for v in bench.views.read()] == [3.0, 0.0]
    bench.time_s = 9.0
    assert bench.views.read()[0].ready_in_s > 0
    hosted.state = ModelState.DRAINING
    assert [view.model for view in bench.views.read()] == ["b"]


def test_measured_speed_replaces_the_prior(bench: Bench) -> None:
    totals = bench.state.models.totals("a")
    totals.observe(EngineStatus("e", "a", prefill_tokens_per_s=40.0))
    bench.run("a", need_tokens=16)
    view = bench.views.read()[0]
    assert (view.prefill_tokens_per_s, view.pending_prefill_s, view.running) == (40.0, 0.5, 1)


def test_memory_is_asked_of_idle_engines_above_their_guarantee(bench: Bench) -> None:
    client = bench.clients["b"]
    kv = client.alloc_kvcache(kvcached.Layout(2, 2, 32, dtype="float32"), 1024, reserved_blocks=0)
    client.publish_evictable(8 * QUANTUM)
    bench.reclaimer.reclaim_tokens(16, "a")
    assert client.usage().asked_bytes == 0  # all that "b" holds is guaranteed to it
    assert kv.alloc_kv(64) is not None
    held = client.usage().reserved_bytes
    assert held > 10 * QUANTUM
    bench.reclaimer.reclaim_tokens(17, "a")
    target = min(2 * QUANTUM, held - 10 * QUANTUM)
    assert client.usage().asked_bytes == target
    bench.reclaimer.reclaim_tokens(17, "a")  # a moment later: on its way already
    assert client.usage().asked_bytes == target
    assert bench.clients["a"].usage().asked_bytes == 0
    assert client.answer_requests(lambda size: kvcached.Shrunk(size or 0)) is not None
    bench.reclaimer.reclaim_tokens(17, "a")
    assert client.usage().asked_bytes == target
    client.free_kvcache(kv)


def test_a_flush_ends_when_all_have_answered_or_ended(bench: Bench) -> None:
    answers: list[int] = []
    a, b = bench.engine("a").id, bench.engine("b").id
    bench.reclaimer.flush([a, b], answers.append)
    bench.clients["a"].answer_requests(lambda _: kvcached.Shrunk(5))
    bench.reclaimer.tick()
    assert answers == []
    bench.reclaimer.flush([a], answers.append)
    bench.clients["a"].answer_requests(lambda _: kvcached.Shrunk(7))
    bench.reclaimer.tick()
    assert answers == [7]
    bench.clients["b"].answer_requests(lambda _: kvcached.Shrunk(1))
    bench.reclaimer.tick()
    assert answers == [7, 6]
    bench.reclaimer.flush([b], answers.append)
    bench.clients["b"].close()
    bench.reclaimer.flush([b], answers.append)  # gone already
    bench.reclaimer.flush([], answers.append)
    bench.reclaimer.tick()
    assert answers == [7, 6, 0, 0, 0]


def test_a_frontend_that_takes_nothing_is_dead_and_blocks_nobody(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "OUTPUT_HIGH_WATER", 10)
    dead: list[str] = []
    tokens = TokenSender(lambda name: f"ipc://{short_dir}/{name}", dead.append)
    lost = request("1", frontend_id="gone")
    for _ in range(20):
        batch = OutputBatch()
        batch.chunk(lost, Chunk("1", 1, 0, [1]))
        tokens.send(batch)
    assert dead == ["gone"]
    tokens.close()


def test_output_goes_to_no_address_that_a_request_names(short_dir: Path) -> None:
    gone: list[str] = []
    config = make_config(short_dir, "parts", redis_url="")
    tokens = TokenSender(config.frontend_endpoint, gone.append)
    for name in ("/../../elsewhere", "x/tcp://127.0.0.1:1"):
        batch = OutputBatch()
        batch.chunk(request("1", frontend_id=name), Chunk("1", 1, 0, [1]))
        tokens.send(batch)
    assert gone == ["/../../elsewhere", "x/tcp://127.0.0.1:1"]
    assert tokens.frontends() == set()
    tokens.close()


def test_output_is_grouped_by_frontend(short_dir: Path) -> None:
    context = zmq.Context()
    inboxes = {name: context.socket(zmq.PULL) for name in ("f0", "f1")}
    for name, inbox in inboxes.items():
        inbox.bind(f"ipc://{short_dir}/{name}")
    tokens = TokenSender(lambda name: f"ipc://{short_dir}/{name}", lambda _: None)
    batch = OutputBatch()
    for n, name in enumerate(("f0", "f1", "f0")):
        batch.chunk(request(str(n), frontend_id=name), Chunk(str(n), 1, 0, [n]))
    tokens.send(batch)
    got = {name: msgspec.msgpack.decode(s.recv(), type=EngineOutput) for name, s in inboxes.items()}
    assert [c.request_id for c in got["f0"].chunks] == ["0", "2"]
    assert [c.request_id for c in got["f1"].chunks] == ["1"]
    assert tokens.frontends() == {"f0", "f1"}
    tokens.close()
    for inbox in inboxes.values():
        inbox.close()
    context.term()


def test_orphaned_requests_get_a_while_to_be_joined_by_their_model(bench: Bench) -> None:
    orphans, timing = OrphanedRequests(bench.state), bench.state.timing
    assert orphans.given_up(["a", "c"]) == set()
    bench.time_s = timing.absent_grace_s
    assert orphans.given_up(["a"]) == set()  # none of "c" waits any more
    assert orphans.given_up(["a", "c"]) == set()
    bench.time_s += timing.absent_grace_s
    assert orphans.given_up(["a", "c"]) == {"c"}
    bench.state.models.hosted["a"].state = ModelState.DRAINING
    assert orphans.given_up(["a"]) == {"a"}


def test_an_engine_that_comes_after_it_was_given_up_is_killed(bench: Bench) -> None:
    unused: Any = None
    fork_server = ForkServerSupervisor(bench.state, unused, unused)
    with subprocess.Popen(["sleep", "600"]) as late, subprocess.Popen(["sleep", "600"]) as wanted:
        fork_server._take(EngineForked(bench.engine("a").id, wanted.pid))
        fork_server._take(EngineForked("given-up", late.pid))
        assert late.wait(10) == -signal.SIGKILL
        assert (bench.engine("a").pid, wanted.poll()) == (wanted.pid, None)
        wanted.kill()


def test_counts_of_an_engine_go_to_the_model_it_served() -> None:
    totals = ModelTotals()
    totals.begin("e0", (100, 90, 1), 1)
    totals.observe(EngineStatus("e0", "a", maps_total=103, unmaps_total=90, retractions_total=2))
    totals.observe(EngineStatus("e0", "a", maps_total=105, unmaps_total=95, retractions_total=2))
    totals.begin("e1", (0, 0, 0), 1)
    totals.observe(EngineStatus("e1", "a", maps_total=4))
    assert (totals.maps, totals.unmaps, totals.retractions) == (9, 5, 1)


def test_speeds_of_another_number_of_ranks_are_forgotten() -> None:
    totals = ModelTotals()
    totals.begin("e0", (0, 0, 0), 1)
    totals.observe(
        EngineStatus("e0", "a", prefill_tokens_per_s=900.0, step_s=0.01, request_s=0.001)
    )
    totals.begin("e1", (0, 0, 0), 1)
    assert (totals.prefill_tokens_per_s, totals.step_s, totals.request_s) == (900.0, 0.01, 0.001)
    totals.begin("e2", (0, 0, 0), 2)
    assert (totals.prefill_tokens_per_s, totals.step_s, totals.request_s) == (0.0, 0.0, 0.0)


def test_wall_clock_deadlines_become_monotonic() -> None:
    scheduler = LocalScheduler()
    table = RequestTable(scheduler, lambda: 1000.0)
    added = []
    scheduler.add = added.append  # type: ignore[method-assign]
    table.wait(TrackedRequest(request("1", arrival_unix_s=1007.0), "1-1"))
    assert (added[0].arrival_s, added[0].deadline_s) == (7.0, 9.0)
