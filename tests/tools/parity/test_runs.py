"""Live and simulated events in the same terms."""

from __future__ import annotations

import msgspec
import pytest

from lab.parity.latency import figures, simulated_records
from lab.parity.parity_results import Figure
from lab.parity.runs import live_run, simulated_run
from prism.errors import ConfigError
from prism.scheduler.decision_journal import Ended, Left, Queued, Started, Stepped
from prism_replay.results import ReplayResults
from prism_sim.cluster.world import World
from tests.sim.clusters import cluster, model, request, work
from tests.tools.parity.worlds import journals, queued, replayed, stepped

EVICT = {"kind": "evict", "model": "a", "device": "host:0"}
MOVE = {"kind": "migrate", "model": "b", "device": "host:0", "target": "host:1"}


def test_live_requests_are_found_by_the_servers_id() -> None:
    arrived = msgspec.structs.replace(queued(0, 101.0, deadline_s=102.5), id="r1-0")
    dispatched = msgspec.structs.replace(stepped(103.0), ids=("r1-0",))
    others = [queued(7, 101.0), stepped(102.0, 7)]
    made = journals([], [arrived, *others, dispatched])
    found = live_run(made, replayed("a", "b"))
    (wait,) = found.waits.values()
    assert (wait.request, wait.rank) == (1, 2)
    assert (wait.queued_s, wait.dispatched_s, wait.deadline_s) == (1.0, 3.0, 2.5)
    assert wait.is_late


def test_actions_begin_before_or_after_the_trace_and_may_fail() -> None:
    cluster_records = [
        Started(time_s=90.0, reason="idle", **EVICT),
        Ended(time_s=91.0, **EVICT),
        Started(time_s=102.0, **MOVE),
        Ended(time_s=103.0, problem="lost", **MOVE),
        Started(time_s=104.0, kind="drop_copy", model="b", device="host:0"),
    ]
    found = live_run(journals(cluster_records, served()), lasting(5.0))
    first, second = found.placements
    assert (first.time_s, first.key, first.problem) == (-10.0, ("evict", "host:0", ""), "")
    assert (second.key, second.problem) == (("migrate", "host:0", "host:1"), "lost")


def test_what_a_cluster_does_after_the_last_answer_has_no_counterpart() -> None:
    evicted = [Started(time_s=time_s, reason="idle", **EVICT) for time_s in (102.9, 103.1)]
    found = live_run(journals(evicted, served()), lasting(3.0))
    assert [p.time_s for p in found.placements] == [pytest.approx(2.9)]
    unknown = msgspec.structs.replace(lasting(3.0).records[0], e2e_ms=None, error="timeout")
    results = msgspec.structs.replace(lasting(3.0), records=[unknown])
    assert len(live_run(journals(evicted, served()), results).placements) == 2


def served() -> list[Queued | Left | Stepped]:
    """Returns the first request of a replay: queued, then dispatched."""
    arrived = msgspec.structs.replace(queued(0, 101.0), id="r0-0")
    return [arrived, msgspec.structs.replace(stepped(103.0), ids=("r0-0",))]


def lasting(seconds: float) -> ReplayResults:
    """Returns a replay of one request, which is answered after `seconds`."""
    results = replayed("a")
    last = msgspec.structs.replace(results.records[0], e2e_ms=seconds * 1000)
    return msgspec.structs.replace(results, records=[last])


def test_results_of_another_replay_or_of_an_older_client() -> None:
    made = journals([], [queued(0, 101.0), stepped(102.0, 0)])
    with pytest.raises(ConfigError, match="does not have a request of --results"):
        live_run(made, replayed("a"))
    without = [msgspec.structs.replace(r, response_id=None) for r in replayed("a").records]
    older = msgspec.structs.replace(replayed("a"), records=without)
    with pytest.raises(ConfigError, match="no request has a response id"):
        live_run(made, older)


def simulated() -> World:
    setup = cluster([model(0, "a"), model(1, "b")])
    world = World(setup, work(setup, [request(2.0, "a"), request(3.0, "b")]), keep_queues=True)
    world.run()
    return world


def test_a_simulation_keeps_the_same_records() -> None:
    found = simulated_run(simulated(), 2.0)
    assert {p.key for p in found.placements} == {("activate", "gpu:0", "")}
    assert found.placements[0].time_s == -2.0
    assert [w.queued_s for w in found.waits.values()] == [0.0, 1.0]
    assert found.waits[0].deadline_s == pytest.approx(1.0)


def test_both_worlds_are_judged_alike() -> None:
    live = replayed("a", "b").records
    ours = simulated_records(simulated().records, live)
    assert [r.slo_ttft_ms for r in ours] == [100.0, 100.0]
    found = {(f.group, f.name): f for f in figures(live, ours, (1.0,), {"a": 0.5, "b": 0.5})}
    assert found["attainment", "TTFT at SLO x1"].live == 1.0
    latency = found["all models", "mean normalised latency"]
    assert latency.live == pytest.approx(0.060 / 5)
    assert found["a", "mean TTFT"].simulated == pytest.approx(10.0)


def test_errors_are_relative_and_of_attainments_differences() -> None:
    assert Figure("g", "n", "ms", 10.0, 11.0).error == pytest.approx(0.1)
    assert Figure("g", "n", "part", 0.9, 0.8).error == pytest.approx(-0.1)
    assert Figure("g", "n", "ms", None, 1.0).error is None
