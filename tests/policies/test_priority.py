"""Priorities in the admission order: class by class, each as if it found the ones above running."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from prism.policies.admission import fcfs, moore_hodgson
from prism.policies.admission.priority_classes import order_by_priority
from prism.policies.data import AdmissionOrder, EngineView, Waiting

ROWS = st.tuples(st.integers(1, 20), st.integers(0, 60), st.integers(0, 9), st.integers(-2, 1))


ENGINES = {"m": EngineView("m", 0, 0, 0, 1, prefill_tokens_per_s=1.0)}


def job(id: str, prefill_s: int, deadline_s: float, arrival_s: float, high: int) -> Waiting:
    return Waiting(id, "m", prefill_s, 1, arrival_s, deadline_s, priority=high)


JOBS = st.lists(ROWS, max_size=7).map(lambda rows: [job(str(n), *r) for n, r in enumerate(rows)])


def by_deadline(job: Waiting) -> tuple[float, float, str]:
    return job.deadline_s, job.arrival_s, job.id


def most_on_time(jobs: list[Waiting], start_s: float) -> int:
    """Returns the size of the largest on-time subset, by trying all."""
    for size in range(len(jobs), 0, -1):
        for some in combinations(sorted(jobs, key=by_deadline), size):
            end_s, in_time = start_s, True
            for each in some:
                end_s += each.prompt_tokens
                in_time &= end_s <= each.deadline_s
            if in_time:
                return size
    return 0


@given(JOBS, st.integers(0, 20), st.integers(0, 20))
def test_each_class_has_as_many_on_time_as_the_classes_above_leave_it(
    jobs: list[Waiting], now_s: int, busy_s: int
) -> None:
    found = order_by_priority(moore_hodgson.order, jobs, ENGINES, now_s, busy_s)
    priorities = sorted({each.priority for each in jobs}, reverse=True)
    start_s, on_time = now_s + busy_s, list(found.on_time)
    for priority in priorities:
        same = [each for each in jobs if each.priority == priority]
        count = most_on_time(same, start_s)
        part, on_time = on_time[:count], on_time[count:]
        assert [each.priority for each in part] == [priority] * count
        assert part == sorted(part, key=by_deadline)
        start_s += sum(each.prompt_tokens for each in same)
    assert not on_time
    assert sorted(found.on_time + found.late, key=by_deadline) == sorted(jobs, key=by_deadline)
    assert list(found.late) == sorted(found.late, key=lambda each: (each.arrival_s, each.id))


@given(JOBS, st.integers(0, 20), st.integers(0, 20))
def test_a_class_is_ordered_as_if_no_lower_one_waited(
    jobs: list[Waiting], now_s: int, busy_s: int
) -> None:
    whole = order_by_priority(moore_hodgson.order, jobs, ENGINES, now_s, busy_s)
    upper = [each for each in jobs if each.priority >= 0]
    alone = order_by_priority(moore_hodgson.order, upper, ENGINES, now_s, busy_s)
    assert tuple(each for each in whole.on_time if each.priority >= 0) == alone.on_time
    assert tuple(each for each in whole.late if each.priority >= 0) == alone.late


@given(JOBS, st.integers(0, 20))
def test_one_class_is_the_policys_order(jobs: list[Waiting], now_s: int) -> None:
    same = [job(j.id, j.prompt_tokens, j.deadline_s, j.arrival_s, 3) for j in jobs]
    assert order_by_priority(moore_hodgson.order, same, ENGINES, now_s, 1.0) == moore_hodgson.order(
        same, ENGINES, now_s, 1.0
    )


def test_first_come_first_served_in_each_class() -> None:
    batch, first, second = (
        job("batch", 1, 9, 0, high=-5),
        job("first", 1, 9, 1, high=0),
        job("second", 1, 2, 2, high=0),
    )
    found = order_by_priority(fcfs.order, [batch, second, first], ENGINES, 3.0)
    assert found == AdmissionOrder((first, second, batch), ())
