"""Admission by the local scheduler: which requests start, which block others, and how long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prism.policies.admission import fcfs, moore_hodgson
from prism.policies.data import AdmissionOrder, EngineView, Waiting
from prism.scheduler.local_scheduler import Limits, LocalScheduler
from prism.scheduler.ordered_queue import CHEAP_ORDER
from prism.scheduler.step_budget import StartResult
from tests.scheduler.device import Device, Engine


class World:
    """Scheduler and its device; `add` makes requests in order of arrival by default."""

    def __init__(
        self,
        free_bytes: int,
        engines: dict[str, Engine],
        order: Callable[..., AdmissionOrder] = moore_hodgson.order,
        **limits: float,
    ) -> None:
        self.device = Device(free_bytes, engines)
        chosen = Limits(**{"headroom_tokens": 2, **limits})  # type: ignore[arg-type]
        self.scheduler = LocalScheduler(chosen, order)
        self.count = 0

    def add(
        self,
        id: str,
        model: str = "a",
        *,
        prompt: int = 2,
        deadline: float = 1e6,
        max_tokens: int = 2,
        arrival: float | None = None,
    ) -> None:
        self.count += 1
        arrival_s = self.count * 1e-3 if arrival is None else arrival
        request = Waiting(id, model, prompt, max_tokens, arrival_s, deadline)
        self.device.requests[id] = request
        self.scheduler.add(request)

    def step(self, now_s: float = 1.0) -> list[str]:
        return self.device.step(self.scheduler, now_s)


class Counted:
    """Moore-Hodgson's order with a count of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        requests: Sequence[Waiting],
        engines: Mapping[str, EngineView],
        now_s: float,
        busy_s: float,
    ) -> AdmissionOrder:
        self.calls += 1
        return moore_hodgson.order(requests, engines, now_s, busy_s)


def test_earliest_deadline_first_and_only_into_free_slots() -> None:
    world = World(1000, {"a": Engine(max_running=2)})
    world.add("last", deadline=30)
    world.add("first", deadline=10)
    world.add("second", deadline=20)
    assert world.step() == ["first", "second"]
    assert world.step() == []
    world.device.engines["a"].running.clear()
    assert world.step() == ["last"]
    assert world.device.asked == []  # slots, not memory, were missing


def test_late_ones_after_the_on_time_ones_oldest_first() -> None:
    world = World(1000, {"a": Engine()})
    world.add("late2", deadline=0.5, arrival=0.2)
    world.add("late1", deadline=0.5, arrival=0.1)
    world.add("on time", deadline=9)
    assert world.step(now_s=1.0) == ["on time", "late1", "late2"]


def test_late_ones_get_their_turn_among_ever_new_on_time_ones() -> None:
    world = World(1000, {"a": Engine(max_running=1)}, late_every=3)
    world.add("late", deadline=0.0)
    served: list[str] = []
    for n in range(6):
        world.add(f"n{n}", deadline=1000.0 + n)
        served += world.step(now_s=1.0 + n)
        world.device.engines["a"].running.clear()
    assert served == ["n0", "n1", "n2", "late", "n3", "n4"]


def test_a_model_that_is_not_ready_blocks_only_itself() -> None:
    world = World(1000, {"a": Engine(ready_in_s=3.0), "b": Engine()})
    world.add("waits", "a", deadline=2)
    world.add("goes", "b")
    world.add("absent", "c")
    assert world.step() == ["goes"]
    assert world.scheduler.waiting() == {"a": 1, "c": 1}
    world.device.engines["a"].ready_in_s = 0.0
    assert world.step() == ["waits"]


def test_activation_that_outlasts_the_deadline_makes_late() -> None:
    """Takes no time from requests that can be on time."""
    engines = {"coming": Engine(ready_in_s=5.0), "a": Engine(max_running=1)}
    world = World(1000, engines)
    world.add("hopeless", "coming", prompt=100, deadline=3.9)
    world.add("in time", "a", prompt=250, deadline=4)
    world.add("later", "a", deadline=9)
    assert world.step(now_s=1.0) == ["in time"]


def test_an_activation_that_ends_early_gives_its_requests_their_chance() -> None:
    engines = {"a": Engine(ready_in_s=5.0, max_running=1)}
    world = World(1000, engines)
    world.add("hopeless so far", deadline=4)
    world.add("in time", deadline=9)
    world.step(now_s=1.0)
    engines["a"].ready_in_s = 0.0
    assert world.step(now_s=1.1) == ["hopeless so far"]


def test_prefill_in_flight_counts_against_deadlines() -> None:
    """Counts 1 s of work in flight elsewhere: of two that need 0.5 s by 1.6 s, one is late."""
    engines = {"a": Engine(max_running=1), "b": Engine(pending_prefill_s=1.0)}
    world = World(1000, engines, prefill_horizon_s=9.0)
    world.add("longer", prompt=60, deadline=1.61)
    world.add("shorter", prompt=50, deadline=1.62)
    assert world.step(now_s=0.0) == ["shorter"]


def test_prefill_beyond_the_horizon_waits_here() -> None:
    engine = Engine(max_running=9, prefill_tokens_per_s=100.0)
    world = World(10_000, {"a": engine}, prefill_horizon_s=0.5)
    for n in range(4):
        world.add(str(n), prompt=40)  # 0.4 s each
    assert world.step() == ["0", "1"]
    engine.pending_prefill_s = 0.51
    assert world.step() == []
    engine.pending_prefill_s = 0.2
    assert world.step() == ["2"]


def test_two_engines_do_not_both_get_the_same_free_memory() -> None:
    engines = {"a": Engine(token_bytes=4), "b": Engine(token_bytes=1)}
    world = World(64, engines)  # 16 tokens for a or 64 for b
    world.add("a", "a", prompt=12)
    world.add("b", "b", prompt=40)
    assert world.step() == ["a"]
    assert world.device.asked == [("b", 42)]


def test_a_head_without_memory_is_overtaken_a_bounded_number_of_times() -> None:
    engines = {"big": Engine(max_running=9), "small": Engine(max_running=9)}
    world = World(64, engines, passes_max=3)
    world.add("s0", "small", prompt=2, max_tokens=9)
    world.step()
    world.add("big", "big", prompt=62, deadline=100)
    for n in range(1, 9):
        world.add(f"s{n}", "small", prompt=2, max_tokens=9, deadline=200 + n)
    assert world.step() == ["s1", "s2", "s3"]
    for _ in range(8):
        assert world.step() == []  # memory is kept for "big" although "small" would fit
        world.device.advance()
    world.device.advance()
    assert world.step()[0] == "big"
    assert ("big", 8) in world.device.asked


def test_memory_is_not_kept_for_ever() -> None:
    engines = {"big": Engine(), "small": Engine(max_running=1)}
    world = World(64, engines, passes_max=1, hold_s=10)
    world.add("never", "big", prompt=1000, deadline=1e6)
    for n in range(3):
        world.add(f"s{n}", "small", deadline=2e6)
    assert world.step(1.0) == ["s0"]
    world.device.engines["small"].running.clear()
    assert world.step(2.0) == []
    assert world.step(12.0) == ["s1"]


def test_an_idle_engine_starts_one_without_headroom() -> None:
    world = World(16, {"a": Engine()}, headroom_tokens=100)
    world.add("1", prompt=8, max_tokens=100)
    world.add("2", prompt=1, max_tokens=100)
    assert world.step() == ["1"]


def test_removed_and_replaced_ones() -> None:
    world = World(1000, {"a": Engine()})
    world.add("1")
    world.add("2")
    world.add("2", prompt=4)
    world.scheduler.remove(["1", "unknown"])
    assert (len(world.scheduler), world.step()) == (1, ["2"])
    assert world.device.engines["a"].running == {"2": 4}


def test_the_order_is_the_policys() -> None:
    world = World(1000, {"a": Engine(max_running=1)}, order=fcfs.order)
    world.add("first", deadline=30)
    world.add("urgent", deadline=10)
    assert world.step() == ["first"]


def test_the_order_is_computed_where_it_decides() -> None:
    """Skips it while no slot is free; then only its age counts."""
    order = Counted()
    engine = Engine(max_running=0)
    world = World(1000, {"a": engine}, order=order, order_age_s=10)
    world.add("1")
    world.add("2")
    for n in range(50):
        world.step(1.0 + n / 100)
    assert order.calls == 1
    engine.max_running = 1
    assert world.step(2.0) == ["1"]
    assert order.calls == 2
    world.add("3")
    for n in range(50):
        world.step(2.0 + n / 100)
    assert order.calls == 2
    world.step(12.0)
    assert order.calls == 3


def test_what_starts_is_chosen_by_an_order_of_that_moment() -> None:
    """Gives up a request that can no longer be on time, however recent the last order is."""
    for looked_s in (1.0, 1.9, 1.999, 2.0):
        engine = Engine(max_running=0)
        world = World(1000, {"a": engine}, order_age_s=10)
        world.add("given up", prompt=50, deadline=2.49)
        world.add("on time", prompt=50, deadline=3.0)
        world.step(0.5)
        world.step(looked_s)
        engine.max_running = 1
        assert world.step(2.0) == ["on time"]


def test_a_huge_queue_is_ordered_only_so_often() -> None:
    order = Counted()
    engine = Engine(max_running=1)
    world = World(10_000, {"a": engine}, order=order)
    for n in range(CHEAP_ORDER + 1001):
        world.add(f"{n}")
    for n in range(100):
        world.step(1.0 + n / 100)
        engine.running.clear()
    assert order.calls == 10


def test_who_is_put_back_into_a_huge_queue_starts_once() -> None:
    """Covers an order of so many that it is kept for a while, with requests that it has started."""
    engine = Engine(max_running=2, prefill_tokens_per_s=1e9)
    world = World(1_000_000, {"a": engine})
    for n in range(2 * CHEAP_ORDER):
        world.add(f"{n}")
    taken = world.step(1.0)
    for id in taken:
        world.scheduler.add(world.device.requests.setdefault(id, Waiting(id, "a", 2, 2, 0.0, 1e6)))
    world.device.dispatched.clear()  # the engine did not take them
    engine.running.clear()
    engine.max_running = 4 * CHEAP_ORDER
    started = world.step(1.001)
    assert len(taken) == 2
    assert sorted(started) == sorted(f"{n}" for n in range(2 * CHEAP_ORDER))


def test_memory_kept_for_one_does_not_stop_others_within_their_guarantee() -> None:
    """Keeps the rest of the device for "big", which the guarantee of "small" could never help."""
    views = [
        EngineView("big", 8, 1, 9, 2, 100.0, shared_tokens=8),
        EngineView("small", 20, 1, 9, 2, 100.0, shared_tokens=8, guaranteed_tokens=12),
    ]
    scheduler = LocalScheduler(Limits(headroom_tokens=2, passes_max=1))
    scheduler.add(Waiting("big", "big", 60, 2, 0.0, 100.0))
    scheduler.add(Waiting("taker", "small", 14, 2, 0.1, 101.0))
    assert scheduler.step(1.0, views).ids == ("taker",)  # the one that may still overtake
    for n, prompt in enumerate((14, 4, 2)):
        scheduler.add(Waiting(f"s{n}", "small", prompt, 2, 0.2, 102.0 + n))
    plan = scheduler.step(2.0, views)
    assert not plan.ids  # "s0" would take what is kept, and is the first
    assert plan.lacking == {"big": 56}
    scheduler.remove(["s0"])
    assert scheduler.step(3.0, views).ids == (
        "s1",
    )  # 4 + 2 + a block for each running one: 8 of 12


def test_windows_and_states_count_with_a_request() -> None:
    """Takes 12 tokens, a window of 4 tokens at half the size, and a state as large as 3 tokens."""
    need = {"window_tokens": 4, "window_share": 0.5, "state_tokens": 3}
    for available, starts in ((16, ()), (17, ("r",))):
        scheduler = LocalScheduler(Limits(headroom_tokens=2))
        scheduler.add(Waiting("r", "m", 10, 2, 0.0, 100.0))
        view = EngineView("m", available, 0, 9, 2, 100.0, **need)
        assert scheduler.step(1.0, [view]).ids == starts


def test_an_engine_at_its_own_limit_takes_nothing_from_others() -> None:
    """Asks for no memory and keeps none, because other models' memory would not help it."""
    views = [
        EngineView("full", 8, 1, 9, 2, 100.0, shared_tokens=64, limit_tokens=8),
        EngineView("free", 64, 1, 9, 2, 100.0, shared_tokens=64),
    ]
    scheduler = LocalScheduler(Limits(headroom_tokens=2, passes_max=1))
    scheduler.add(Waiting("full", "full", 20, 2, 0.0, 100.0))
    for n in range(3):
        scheduler.add(Waiting(f"f{n}", "free", 4, 2, 0.1, 101.0 + n))
    plan = scheduler.step(1.0, views)
    assert plan.starts == {"free": ["f0", "f1", "f2"]}
    assert plan.lacking == {}
    assert plan.blocked == {"full": StartResult.LIMIT}


def test_what_others_take_does_not_count_against_a_limit() -> None:
    views = [
        EngineView("a", 8, 0, 9, 2, 100.0, shared_tokens=64, limit_tokens=8),
        EngineView("b", 64, 0, 9, 2, 100.0, shared_tokens=64),
    ]
    scheduler = LocalScheduler(Limits(headroom_tokens=2))
    scheduler.add(Waiting("b", "b", 20, 2, 0.0, 100.0))
    for n in range(3):
        scheduler.add(Waiting(f"a{n}", "a", 1, 2, 0.1, 101.0 + n))
    # 2 tokens for "a0", 4 and a block for "a1"; "a2" would need 8.
    assert scheduler.step(1.0, views).ids == ("b", "a0", "a1")


def test_suspects_start_one_at_a_time_before_all_others_of_their_engine() -> None:
    """Starts the one with the least output first, on an idle engine.

    Nothing else starts there during its trial; then it is preempted for the next one.
    """
    scheduler = LocalScheduler(Limits(headroom_tokens=2))
    scheduler.add(Waiting("plain", "a", 1, 2, 0.0, 1.0))
    scheduler.add(Waiting("late suspect", "a", 1, 2, 0.0, 2.0, suspected_at=9))
    scheduler.add(Waiting("early suspect", "a", 1, 2, 0.0, 3.0, suspected_at=0))
    scheduler.add(Waiting("other", "b", 1, 2, 0.0, 4.0))
    started = []
    for running, trial in ((1, False), (0, False), (1, True), (1, False), (0, False), (1, False)):
        views = [
            EngineView("a", 100, running, 9, 2, 100.0, on_trial=trial),
            EngineView("b", 100, 1, 9, 2, 100.0),
        ]
        plan = scheduler.step(1.0, views)
        started.append((plan.ids, plan.preempt))
    assert started == [
        (("other",), ("a",)),
        (("early suspect",), ()),
        ((), ()),
        ((), ("a",)),
        (("late suspect",), ()),
        (("plain",), ()),
    ]


def test_a_lone_suspect_waits_for_an_idle_engine() -> None:
    scheduler = LocalScheduler(Limits(headroom_tokens=2))
    scheduler.add(Waiting("suspect", "a", 1, 2, 0.0, 2.0, suspected_at=0))
    assert scheduler.step(1.0, [EngineView("a", 100, 1, 9, 2, 100.0)]).ids == ()
    assert scheduler.step(2.0, [EngineView("a", 100, 0, 9, 2, 100.0)]).ids == ("suspect",)


def test_a_suspect_that_leaves_or_lacks_memory_stops_no_other_model() -> None:
    scheduler = LocalScheduler(Limits(headroom_tokens=2))
    scheduler.add(Waiting("suspect", "a", 8, 2, 0.0, 2.0, suspected_at=0))
    scheduler.add(Waiting("plain", "a", 1, 2, 0.0, 2.0))
    scheduler.add(Waiting("other", "b", 1, 2, 0.0, 4.0))
    views = [EngineView("a", 4, 0, 9, 2, 100.0), EngineView("b", 100, 1, 9, 2, 100.0)]
    plan = scheduler.step(1.0, views)
    assert (plan.ids, plan.lacking) == (("other",), {"a": 6})
    scheduler.remove(["suspect"])
    assert scheduler.step(2.0, views).ids == ("plain",)


def test_a_trial_blocks_its_own_model_only() -> None:
    scheduler = LocalScheduler(Limits(headroom_tokens=2))
    scheduler.add(Waiting("plain", "a", 1, 2, 0.0, 1.0))
    plan = scheduler.step(1.0, [EngineView("a", 100, 1, 9, 2, 100.0, on_trial=True)])
    assert plan.blocked == {"a": StartResult.TRIAL}
