"""Copies of a model in whole simulations: a hot model gets them and gives them back, and no request
is lost or served twice on the way."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.policies.data import Activate, Evict
from prism_sim.cluster.world import World
from prism_sim.core.records import Records
from prism_sim.core.setup import ActivationSettings, ClusterSetup
from tests.sim.clusters import cluster, model, request, work

# An engine runs 16 requests at a time, each for 200 steps of 11 ms: seven requests a second.
RATE, TOKENS = 7.0, 200


def hot(most: int, gpus: int = 4) -> ClusterSetup:
    one = model(0, "a", replicas_max=most, activation_s=2.0, slo_tpot_s=0.2)
    return cluster([one], gpus, activation=ActivationSettings(layout_s=0.0))


def run(setup: ClusterSetup, rate: float, busy_s: float, until_s: float) -> Records:
    """Sends `rate` requests a second for `busy_s`, then one every few seconds."""
    chance = random.Random(1)
    time_s, trace = 0.0, []
    while time_s < until_s:
        trace.append(request(time_s, "a", output=TOKENS))
        time_s += chance.expovariate(rate if time_s < busy_s else 0.3)
    return World(setup, work(setup, trace)).run()


def most_copies(records: Records) -> int:
    up = most = 0
    for decision in records.decisions:
        up += {"active": 1, "evicted": -1}.get(decision.kind, 0)
        most = max(most, up)
    return most


def late(records: Records, since_s: float) -> float:
    """Returns the fraction of the requests since `since_s` whose first token is late."""
    waits = [
        records.first_s[i] - arrival_s > records.work.slo_ttft_s[i]
        for i, arrival_s in enumerate(records.work.arrival_s)
        if arrival_s >= since_s
    ]
    return sum(waits) / len(waits)


def test_three_times_what_a_device_serves_meets_its_slo_and_copies_leave_again() -> None:
    records = run(hot(4), 2.6 * RATE, 200.0, 500.0)
    assert most_copies(records) in (3, 4)
    assert late(records, 60.0) < 0.05
    kinds = Counter(d.kind for d in records.decisions)
    assert kinds["active"] - kinds["evicted"] == 1
    assert not records.errors


def test_a_copy_comes_when_the_queue_has_lasted_and_no_interval_later() -> None:
    setup = replace(hot(2, 2), interval_s=1000.0)
    trace = [request(100.0 + 0.01 * i, "a", output=TOKENS) for i in range(64)]
    records = World(setup, work(setup, trace)).run()
    begun, up, copy, *_ = (d.time_s for d in records.decisions)
    lasts_s = max(setup.models[0].slo_ttft_s, up - begun)
    first_s = 100.16  # the seventeenth is the first that waits
    assert copy == pytest.approx(first_s + lasts_s, abs=0.001)


def test_a_bound_of_one_is_one_place() -> None:
    records = run(hot(1), 2.6 * RATE, 60.0, 60.0)
    assert [d.kind for d in records.decisions] == ["activate", "active"]


def test_a_model_that_one_device_serves_gets_no_copy() -> None:
    records = run(hot(4), 0.4 * RATE, 300.0, 300.0)
    assert most_copies(records) == 1


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 20.0), st.sampled_from("ab")), min_size=1, max_size=60),
    st.lists(
        st.tuples(st.floats(0.1, 25.0), st.sampled_from("ab"), st.integers(0, 2), st.booleans()),
        max_size=12,
    ),
)
def test_copies_that_come_and_go_at_any_time_lose_nothing(
    arrivals: list[tuple[float, str]], orders: list[tuple[float, str, int, bool]]
) -> None:
    """Ends each request once, with its tokens, even if the last copy leaves."""
    both = [model(i, name, replicas_max=3, activation_s=0.5) for i, name in enumerate("ab")]
    setup = cluster(both, 3)
    trace = [request(t, name, output=30) for t, name in arrivals]
    world = World(setup, work(setup, trace))

    def order(name: str, number: int, leaves: bool) -> None:
        view = world.controller.view()
        here = {m.device: m for m in view.models if m.name == name and m.device}
        device = f"gpu:{number}"
        if leaves and device in here and here[device].state == "active":
            world.controller.apply(Evict(name, device, "test", move_running=number == 1))
        elif not leaves and device not in here and here:
            world.controller.apply(Activate(name, device, "test", joins=True))

    for time_s, name, number, leaves in orders:
        world.kernel.at(time_s, order, name, number, leaves)
    records = world.run()
    assert records.ended == len(trace)
    assert not records.errors
    assert all(records.output_tokens[i] == records.work.output_tokens[i] for i in range(len(trace)))
    for device in world.devices:
        assert device.ledger.reserved_bytes >= 0


def test_what_waits_is_divided_among_the_copies() -> None:
    """Requests that were there before the second copy start on both."""
    setup = replace(hot(2, 2), interval_s=1.0)
    trace = [request(0.001 * i, "a", output=TOKENS) for i in range(64)]
    trace += [request(5.0 + i, "a", output=TOKENS) for i in range(5)]
    records = World(setup, work(setup, trace)).run()
    served = Counter(records.device[i] for i in range(64))
    assert min(served[0], served[1]) >= 16
