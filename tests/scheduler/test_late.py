"""Late requests start, but take few starts from those that can be on time (decision 023)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.policies.data import Waiting
from prism.scheduler.local_scheduler import Limits, LocalScheduler
from tests.scheduler.device import Device, Engine

MODELS = tuple(f"m{n:02}" for n in range(64))


class Backlog:
    """Models with late requests, and always at least one on-time request each.

    Engines end what they run within a step. Ids begin with the model's name and "late" or "soon".
    """

    def __init__(self, models: int, slots: int = 1, late_every: int = 4) -> None:
        self.models = MODELS[:models]
        engines = {m: Engine(max_running=slots, prefill_tokens_per_s=1e6) for m in self.models}
        self.device = Device(1 << 20, engines)
        limits = Limits(headroom_tokens=2, late_every=late_every)
        self.scheduler = LocalScheduler(limits)
        self.now_s = 1000.0
        self.count = 0

    def add(self, model: str, *, late: bool, priority: int = 0) -> str:
        self.count += 1
        deadline_s = 0.0 if late else self.now_s + 1e4
        id = f"{model}-{'late' if late else 'soon'}-{self.count:05}"
        request = Waiting(id, model, 2, 2, self.count * 1e-3, deadline_s, priority=priority)
        self.device.requests[id] = request
        self.scheduler.add(request)
        return id

    def step(self) -> list[str]:
        self.now_s += 1.0
        started = self.device.step(self.scheduler, self.now_s)
        for engine in self.device.engines.values():
            engine.running.clear()
        return started


@pytest.mark.parametrize("one_at_a_time", [True, False])
@pytest.mark.parametrize("models", [1, 2, 4, 8, 16, 64])
def test_late_ones_get_one_start_in_five_at_most_however_many_models_have_some(
    models: int, one_at_a_time: bool
) -> None:
    """Holds whether engines take requests in turn or all in the same step."""
    backlog = Backlog(models)
    for n in range(240):
        backlog.add(backlog.models[n % models], late=True)
    started: list[str] = []
    while len(started) < 320:
        for model in backlog.models:
            backlog.add(model, late=False)
        for turn in range(models if one_at_a_time else 1):
            for n, engine in enumerate(backlog.device.engines.values()):
                engine.max_running = int(n == turn or not one_at_a_time)
            started += backlog.step()
    late = [id for id in started if "late" in id]
    assert 0 < len(late) / len(started) <= 0.21
    if one_at_a_time:
        assert len(late) / len(started) > 0.19
    else:
        assert late == sorted(late, key=lambda id: id[-5:])  # in order of arrival


def test_turns_come_within_one_step_too() -> None:
    backlog = Backlog(1, slots=10)
    late = [backlog.add("m00", late=True) for _ in range(9)]
    soon = [backlog.add("m00", late=False) for _ in range(9)]
    assert backlog.step() == [*soon[:4], late[0], *soon[4:8], late[1]]


def test_who_cannot_start_leaves_the_turn_to_the_next_late_one() -> None:
    """Keeps the turn: it is the next late one to start once its engine takes it."""
    backlog = Backlog(3, late_every=2)
    stuck = backlog.device.engines["m00"]
    stuck.max_running = 0
    first = backlog.add("m00", late=True)
    others = [backlog.add("m01", late=True) for _ in range(20)]
    started: list[str] = []
    for _ in range(9):
        backlog.add("m02", late=False)
        backlog.add("m01", late=False)
        started += backlog.step()
    late = [id for id in started if "late" in id]
    assert len(late) > 2
    assert late == others[: len(late)]
    stuck.max_running = 1
    backlog.add("m02", late=False)
    backlog.add("m01", late=False)
    assert first in [*backlog.step(), *backlog.step()]


def test_who_comes_late_has_no_turn_saved_up() -> None:
    """Counts starts only while a late one waits."""
    backlog = Backlog(2, late_every=3)
    for _ in range(9):
        backlog.add("m00", late=False)
        backlog.add("m00", late=False)
        backlog.step()
    late = backlog.add("m00", late=True)
    started = [id for _ in range(4) for id in backlog.step()]
    assert started.index(late) == 3


def able(late: list[str], shut: set[str]) -> str | None:
    """Returns the oldest of `late` whose engine takes requests."""
    return next((id for id in late if id[:3] not in shut), None)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 5),
    st.lists(st.lists(st.integers(0, 11), max_size=3), min_size=1, max_size=40),
    st.lists(st.integers(0, 11), min_size=1, max_size=30),
)
def test_the_oldest_late_one_is_passed_a_bounded_number_of_times(
    models: int, slots: int, late_every: int, closed: list[list[int]], late: list[int]
) -> None:
    """Bounds the starts before the oldest late request whose engine takes requests.

    There are at most `late_every` and one step's starts before it, and at least `late_every`
    between two late ones.

    `closed`: for each step, engines that take nothing.
    """
    backlog = Backlog(models, slots, late_every)
    waiting = [backlog.add(backlog.models[n % models], late=True) for n in late]
    for model in backlog.models:
        for _ in range(slots * (len(closed) + len(late) * (late_every + 1))):
            backlog.add(model, late=False)
    passed: dict[str, int] = {}
    started: list[str] = []
    for step in range(len(closed) + len(late) * (late_every + 1)):
        shut = {backlog.models[n % models] for n in closed[step]} if step < len(closed) else set()
        for model, engine in backlog.device.engines.items():
            engine.max_running = 0 if model in shut else slots
        passed = {id: n for id, n in passed.items() if id == able(waiting, shut)}
        for id in backlog.step():
            started.append(id)
            oldest = able(waiting, shut)
            if id in waiting:
                assert id == oldest
                waiting.remove(id)
            elif oldest is not None:
                passed[oldest] = passed.get(oldest, 0) + 1
                assert passed[oldest] <= late_every + slots * models
    assert not waiting
    positions = [n for n, id in enumerate(started) if "late" in id]
    assert all(b - a > late_every for a, b in itertools.pairwise(positions))


def test_late_ones_that_fill_idle_engines_take_no_turn_from_the_oldest() -> None:
    """Starts the oldest in its turn, although on-time requests of its model fill its engine.

    Late ones of another model start because nothing else can there.
    """
    backlog = Backlog(2)
    oldest = backlog.add("m00", late=True)
    started: list[str] = []
    for _ in range(12):
        backlog.add("m01", late=True)
        backlog.add("m00", late=False)
        started += backlog.step()
    assert "soon" in started[0]
    assert started.index(oldest) <= 2 * 4 + 2


def test_a_higher_priority_starts_first_whoever_is_late() -> None:
    backlog = Backlog(2, late_every=100)
    model, other = backlog.models
    low = [backlog.add(model, late=False, priority=-1) for _ in range(3)]
    late = [backlog.add(model, late=True) for _ in range(2)]
    high = [backlog.add(model, late=True, priority=1), backlog.add(other, late=False, priority=1)]
    soon = backlog.add(other, late=False)
    started = [id for _ in range(6) for id in backlog.step()]
    assert [id for id in started if id.startswith(model)] == [high[0], *late, *low]
    assert [id for id in started if id.startswith(other)] == [high[1], soon]


def test_one_that_comes_overtakes_those_of_lower_priority_that_wait() -> None:
    """Holds before the order is computed again, too."""
    backlog = Backlog(1, slots=0)
    low = [backlog.add("m00", late=False, priority=-1) for _ in range(2)]
    backlog.step()
    high = backlog.add("m00", late=False)
    backlog.device.engines["m00"].max_running = 1
    assert [id for _ in range(3) for id in backlog.step()] == [high, *low]


@pytest.mark.parametrize("high_late", [False, True])
def test_a_flood_of_higher_priority_leaves_late_ones_their_turns(high_late: bool) -> None:
    backlog = Backlog(1, late_every=4)
    low = [backlog.add("m00", late=True, priority=-9) for _ in range(5)]
    started: list[str] = []
    for _ in range(30):
        backlog.add("m00", late=high_late, priority=9)
        started += backlog.step()
    positions = [n for n, id in enumerate(started) if id in low]
    assert [id for id in started if id in low] == low
    assert positions == [4, 9, 14, 19, 24]
