"""QLM: groups, virtual queues ordered by estimated waiting time, swaps with nothing left to run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from prism.policies.baselines import qlm
from prism.policies.baselines.qlm import QlmSettings
from prism.policies.data import Activate, Evict, Refuse, Settings
from prism.policies.placement import Hosted, Placement, Unit
from prism.policies.queues import (
    QueueDevice,
    QueuedRequest,
    QueueView,
    RequestGroup,
    VirtualQueue,
)
from tests.policies.clusters import active, gpu, model, view
from tests.policies.loads import problem, spec

MODELS = frozenset("abc")
first_idle = partial(qlm.assign, settings=QlmSettings(first_idle=True))


def request(id: str, model: str = "a", at: float = 0.0, slo: float = 10.0) -> QueuedRequest:
    return QueuedRequest(id, model, at, at + slo, prompt_tokens=10, output_tokens=100.0)


def queue_view(
    waiting: Sequence[QueuedRequest],
    devices: Sequence[QueueDevice],
    queues: Sequence[VirtualQueue] = (),
    now_s: float = 0.0,
) -> QueueView:
    """Returns a view with 100 tokens/s, one second per request and five per swap."""
    speed, swap = dict.fromkeys(MODELS, 100.0), dict.fromkeys(MODELS, 5.0)
    return QueueView(now_s, tuple(waiting), tuple(devices), tuple(queues), speed, swap)


def device(name: str, model: str | None = None, running: int = 0) -> QueueDevice:
    return QueueDevice(name, model, running, MODELS)


def ids(queues: Sequence[VirtualQueue]) -> dict[str, list[tuple[str, ...]]]:
    return {q.device: [g.requests for g in q.groups] for q in queues}


def test_requests_of_one_model_and_slo_form_a_group() -> None:
    waiting = [request("1"), request("2", slo=99.0), request("3", at=1.0), request("4", "b")]
    (queue,) = qlm.assign(queue_view(waiting, [device("g0", "a")]))
    assert sorted(g.requests for g in queue.groups) == [("1", "3"), ("2",), ("4",)]
    group = next(g for g in queue.groups if g.requests == ("1", "3"))
    assert (group.deadline_s, group.output_tokens) == (10.0, 200.0)


def test_groups_are_bounded_and_newcomers_join_them() -> None:
    three = partial(qlm.assign, settings=QlmSettings(group_requests_max=3))
    first = three(queue_view([request(str(i), at=i) for i in range(4)], [device("g0")]))
    assert ids(first) == {"g0": [("0", "1", "2"), ("3",)]}
    waiting = [request(str(i), at=i) for i in range(1, 6)]  # request 0 has started
    assert ids(three(queue_view(waiting, [device("g0")], first))) == {
        "g0": [("1", "2"), ("3", "4", "5")]
    }


def test_the_first_idle_instance_is_taken_whatever_it_holds() -> None:
    """Reproduces the cause of unnecessary swaps (Prism §7.5)."""
    devices = [device("g0", "b"), device("g1", "a")]
    assert ids(first_idle(queue_view([request("1", "a")], devices))) == {"g0": [("1",)], "g1": []}
    assert ids(qlm.assign(queue_view([request("1", "a")], devices))) == {"g0": [], "g1": [("1",)]}


def test_a_busy_instance_is_not_idle() -> None:
    devices = [device("g0", "b", running=1), device("g1", "b")]
    assert ids(first_idle(queue_view([request("1", "a")], devices)))["g1"] == [("1",)]


def test_without_an_idle_one_the_least_work_is_taken() -> None:
    queues = [
        VirtualQueue("g0", (RequestGroup("x", "a", 9.0, 9.0, ("x", "y"), 200.0),)),
        VirtualQueue("g1", (RequestGroup("z", "b", 9.0, 9.0, ("z",), 100.0),)),
    ]
    waiting = [request("x"), request("y"), request("z", "b"), request("new", "c")]
    found = first_idle(queue_view(waiting, [device("g0"), device("g1")], queues))
    assert ("new",) in ids(found)["g1"]


def test_waiting_times_count_tokens_ahead_and_swaps() -> None:
    groups = [
        RequestGroup("1", "a", 9.0, 9.0, ("1",), 300.0),
        RequestGroup("2", "a", 9.0, 9.0, ("2",), 100.0),
        RequestGroup("3", "b", 9.0, 9.0, ("3",), 100.0),
    ]
    seen = queue_view([], [device("g0", "a")])
    assert qlm.waiting_s(groups, device("g0", "a"), seen) == [0.0, 3.0, 9.0]
    assert qlm.waiting_s(groups, device("g0"), seen) == [5.0, 8.0, 14.0]


def test_an_urgent_group_goes_before_but_no_swap_is_made_for_nothing() -> None:
    here = [request("1", "a", slo=100.0), request("2", "b", slo=100.0)]
    queues = qlm.assign(queue_view(here, [device("g0", "a")]))
    assert ids(queues) == {"g0": [("1",), ("2",)]}
    urgent = request("3", "b", slo=5.5)
    after = ids(qlm.assign(queue_view([*here, urgent], [device("g0", "a")], queues)))["g0"]
    assert after == [("3",), ("2",), ("1",)]
    relaxed = request("4", "a", slo=200.0)
    after = ids(qlm.assign(queue_view([*here, relaxed], [device("g0", "a")], queues)))["g0"]
    assert after == [("1",), ("4",), ("2",)]


def test_a_queue_with_a_late_group_may_go_by_deadline() -> None:
    """Follows QLM's published code: late groups are served even if others become late."""
    by_deadline = partial(qlm.assign, settings=QlmSettings(by_deadline=True))

    def orders(slo_s: float) -> list[list[tuple[str, ...]]]:
        here = [request("1", "b", slo=slo_s), request("2", "a", at=0.5, slo=slo_s)]
        seen = queue_view(here, [device("g0", "a")])
        return [ids(assign(seen))["g0"] for assign in (qlm.assign, by_deadline)]

    # a swap takes five seconds: "b" cannot be there in four
    assert orders(4.0) == [[("2",), ("1",)], [("1",), ("2",)]]
    assert orders(9.0) == [[("2",), ("1",)], [("2",), ("1",)]]


def test_a_group_that_starts_is_closed() -> None:
    """Removes a starting group from the queue. Later requests form another group."""
    first = qlm.assign(queue_view([request("1"), request("2")], [device("g0", "a")]))
    assert ids(first) == {"g0": [("1", "2")]}
    running = device("g0", "a", running=2)
    later = qlm.assign(queue_view([request("3", at=1.0)], [running], first))
    assert ids(later) == {"g0": [("3",)]}


def test_a_group_leaves_an_instance_that_no_longer_serves_its_model() -> None:
    """Covers a new placement: the request goes to the queue of another instance."""
    queues = qlm.assign(queue_view([request("1", "b")], [device("g0", "b"), device("g1")]))
    assert ids(queues) == {"g0": [("1",)], "g1": []}
    changed = [QueueDevice("g0", "a", 0, frozenset("a")), device("g1")]
    after = qlm.assign(queue_view([request("1", "b")], changed, queues))
    assert ids(after) == {"g0": [], "g1": [("1",)]}


groups_strategy = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 30), st.integers(1, 5)),
    min_size=1,
    max_size=5,
).map(
    lambda rows: [
        RequestGroup(f"{i}", m, float(d), float(d), (f"{i}",), 100.0 * n)
        for i, (m, d, n) in enumerate(rows)
    ]
)


@given(groups_strategy)
@settings(max_examples=150, deadline=None)
def test_a_queue_is_never_worse_than_appending(groups: list[RequestGroup]) -> None:
    seen, home = queue_view([], [device("g0", "a")]), device("g0", "a")
    order: list[RequestGroup] = []
    for group in groups:
        appended = qlm._cost([*order, group], home, seen)
        order = qlm._improved(qlm._inserted(group, order, home, seen), home, seen)
        assert qlm._cost(order, home, seen) <= appended
        assert sorted(g.id for g in order) == sorted(g.id for g in groups[: len(order)])


def test_most_queues_are_the_best_of_all_permutations() -> None:
    random, best_count = Random(1), 0
    for _ in range(60):
        groups = [
            RequestGroup(
                f"{i}", random.choice("abc"), d, d, (f"{i}",), 100.0 * random.randint(1, 5)
            )
            for i, d in enumerate(random.choices(range(5, 40), k=5))
        ]
        seen, home = queue_view([], [device("g0", "a")]), device("g0", "a")
        order: list[RequestGroup] = []
        for group in groups:
            order = qlm._improved(qlm._inserted(group, order, home, seen), home, seen)
        best = min(qlm._cost(p, home, seen) for p in itertools.permutations(groups))
        best_count += qlm._cost(order, home, seen)[0] == best[0]
    assert best_count >= 50


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 3)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_every_request_is_in_one_queue_or_has_no_instance(rows: list[tuple[str, int]]) -> None:
    waiting = [request(f"{i}", m, at=i, slo=float(s)) for i, (m, s) in enumerate(rows)]
    devices = [device("g0", "a", running=2), device("g1")]
    queues = partial(qlm.assign, settings=QlmSettings(group_requests_max=2))(
        queue_view(waiting, devices)
    )
    queued = [id for q in queues for g in q.groups for id in g.requests]
    assert sorted(queued) == sorted(r.id for r in waiting if r.model in MODELS)
    again = partial(qlm.assign, settings=QlmSettings(group_requests_max=2))(
        queue_view(waiting, devices, queues)
    )
    assert again == queues


# --- swapping ------------------------------------------------------------------------------


def head(device: str, model: str) -> VirtualQueue:
    return VirtualQueue(device, (RequestGroup("1", model, 1.0, 1.0, ("1",), 1.0),))


def planned(models: Sequence[Any], count: int, **more: Any) -> list[tuple[str, ...]]:
    seen = view(models, [gpu(f"g{i}") for i in range(count)], **more)
    found = []
    for action in qlm.plan(seen, Settings()):
        assert isinstance(action, Activate | Evict | Refuse)
        peers = action.peers if isinstance(action, Activate) else ()
        where = "" if isinstance(action, Refuse) else action.device
        found.append((type(action).__name__.lower(), action.model, where, *peers))
    return found


def test_the_first_groups_model_is_swapped_in() -> None:
    models = [active("a", "g0"), model("b", waiting=1)]
    queues = (head("g0", "b"),)
    swap = [("evict", "a", "g0"), ("activate", "b", "g0")]
    assert planned(models, 1, queues=queues) == swap
    assert planned([model("b", waiting=1)], 1, queues=queues) == [("activate", "b", "g0")]
    assert planned([active("b", "g0")], 1, queues=queues) == []


def test_a_swap_waits_until_nothing_runs() -> None:
    busy = active("a", "g0", running=1)
    assert planned([busy, model("b", waiting=1)], 1, queues=(head("g0", "b"),)) == []
    leaving = structs.replace(busy, running=0, state="draining")
    assert planned([leaving, model("b", waiting=1)], 1, queues=(head("g0", "b"),)) == []


def test_a_swap_evicts_all_that_is_there_and_waits_for_what_is_not_in_the_view() -> None:
    """Covers a model that an operator activated, and one that another scheduler was evicting."""
    models = [active("a", "g0"), active("c", "g0"), model("b", waiting=1)]
    assert planned(models, 1, queues=(head("g0", "b"),)) == [
        ("evict", "a", "g0"), ("evict", "c", "g0"), ("activate", "b", "g0")
    ]  # fmt: skip
    seen = view([model("b", waiting=1)], [gpu("g0", fixed_bytes=1)], queues=(head("g0", "b"),))
    assert qlm.plan(seen, Settings()) == ()


def test_a_model_that_a_reload_removed_is_not_swapped_in() -> None:
    assert planned([active("a", "g0")], 1, queues=(head("g0", "gone"),)) == []


def test_a_failed_activation_is_not_repeated_at_once() -> None:
    target = Placement((Unit(("g0",), (Hosted("a"), Hosted("b"))),))
    failed = model("a", wanted=True, barred=("g0",))
    assert planned([failed, model("b", wanted=True)], 1, target=target) == [("activate", "b", "g0")]


def test_the_same_model_may_be_on_two_instances() -> None:
    models = [active("a", "g0"), active("b", "g1")]
    queues = (head("g0", "a"), head("g1", "a"))
    assert planned(models, 2, queues=queues) == [("evict", "b", "g1"), ("activate", "a", "g1")]


def test_tensor_parallel_instances() -> None:
    target = Placement((Unit(("g0", "g1")),))
    models = [active("a", "g0", tp=2, peers=("g1",)), model("b", tp=2, waiting=1)]
    assert planned(models, 2, queues=(head("g0", "b"),), target=target) == [
        ("evict", "a", "g0"),
        ("activate", "b", "g0", "g1"),
    ]


def test_a_model_without_instance_is_refused() -> None:
    assert planned([model("a", waiting=1)], 1, queues=(VirtualQueue("g0"),)) == [
        ("refuse", "a", "")
    ]


def test_a_model_that_failed_on_its_only_instance_is_refused_for_now() -> None:
    target = Placement((Unit(("g0",), (Hosted("a"),)),))
    failed = model("a", waiting=1, barred=("g0",))
    assert planned([failed], 1, queues=(VirtualQueue("g0"),), target=target) == [
        ("refuse", "a", "")
    ]


def test_who_is_in_no_queue_yet_is_not_refused() -> None:
    """Queues are made anew only so often: requests that came since are in none."""
    target = Placement((Unit(("g0",), (Hosted("a"),)),))
    assert planned([model("a", waiting=1)], 1, queues=(VirtualQueue("g0"),), target=target) == []


# --- instances -----------------------------------------------------------------------------


def test_instances_by_degree_and_computation() -> None:
    models = [spec("large", "65b", rate=0.1), *(spec(f"m{i}", rate=2.0) for i in range(4))]
    placement = qlm.search(problem(models, 8))
    assert sorted(u.tp for u in placement.units) == [1] * 6 + [2]
    for unit in placement.units:
        assert [h.model for h in unit.models] == (
            ["large"] if unit.tp == 2 else ["m0", "m1", "m2", "m3"]
        )


def test_degrees_without_devices_are_refused() -> None:
    placement = qlm.search(problem([spec("large", "65b", tp_degrees=(4, 8)), spec("a")], 2))
    assert list(placement.refused) == ["large"]
    nothing = qlm.search(problem([spec("large", "65b", tp_degrees=(1,))], 2))
    assert nothing.refused == {"large": "its weights fit at none of its TP degrees"}
