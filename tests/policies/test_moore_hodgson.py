"""Moore-Hodgson against brute force: as many on time as any subset allows (Prism Algorithm 2)."""

from __future__ import annotations

from itertools import combinations_with_replacement, product
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from prism.policies.admission import fcfs
from prism.policies.admission.moore_hodgson import order
from prism.policies.data import AdmissionOrder, EngineView, Waiting


def engine(model: str, ready_in_s: float = 0.0) -> EngineView:
    """Returns an engine that prefills one token per second."""
    return EngineView(model, 0, 0, 0, 1, prefill_tokens_per_s=1.0, ready_in_s=ready_in_s)


ENGINES = {"m": engine("m")}


def job(
    id: str, prefill_s: int, deadline_s: float, arrival_s: float = 0.0, model: str = "m"
) -> Waiting:
    return Waiting(id, model, prefill_s, 1, arrival_s, deadline_s)


def all_in_time(jobs: tuple[Waiting, ...], start_s: float) -> bool:
    """Returns True if all prefills, in this order from `start_s`, end by their deadlines."""
    for each in jobs:
        start_s += each.prompt_tokens
        if start_s > each.deadline_s:
            return False
    return True


def best_counts(prefills: NDArray[np.int64], deadlines: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the size of the largest on-time subset of each row, by trying all subsets.

    A set can be on time in some order if and only if it is in deadline order, and rows come
    sorted by deadline.
    """
    rows, width = prefills.shape
    best = np.zeros(rows, np.int64)
    for subset in product((0, 1), repeat=width):
        chosen = np.array(subset)
        ends = np.cumsum(prefills * chosen, axis=1)
        feasible = ((ends <= deadlines) | (chosen == 0)).all(axis=1)
        best = np.maximum(best, np.where(feasible, chosen.sum(), 0))
    return best


@pytest.mark.parametrize(
    ("count", "prefill_max", "deadline_max"),
    [(n, 3, 6) for n in range(1, 7)] + [(n, 4, 10) for n in range(1, 5)],
)
def test_equals_brute_force_on_all_small_instances(
    count: int, prefill_max: int, deadline_max: int
) -> None:
    kinds = list(product(range(1, deadline_max + 1), range(1, prefill_max + 1)))
    jobs = {kind: [job(str(n), kind[1], kind[0]) for n in range(count)] for kind in kinds}
    instances = list(combinations_with_replacement(kinds, count))
    table = np.array(instances)
    best = best_counts(table[:, :, 1], table[:, :, 0])
    for instance, expected in zip(instances, best, strict=True):
        found = order([jobs[kind][n] for n, kind in enumerate(instance)], ENGINES, 0.0)
        assert len(found.on_time) == expected, instance
        assert all_in_time(found.on_time, 0.0), instance
        assert len(found.late) == count - expected


jobs_strategy = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 120), st.integers(0, 9)), max_size=7
).map(lambda rows: [job(str(n), *row) for n, row in enumerate(rows)])


@given(jobs_strategy, st.integers(0, 20), st.integers(0, 20))
def test_equals_brute_force_later_and_busy(jobs: list[Waiting], now_s: int, busy_s: int) -> None:
    found = order(jobs, ENGINES, now_s, busy_s)
    rows = sorted(jobs, key=lambda each: each.deadline_s)
    best = max(
        sum(subset)
        for subset in product((0, 1), repeat=len(rows))
        if all_in_time(
            tuple(r for r, chosen in zip(rows, subset, strict=True) if chosen), now_s + busy_s
        )
    )
    assert len(found.on_time) == best
    assert all_in_time(found.on_time, now_s + busy_s)


@given(jobs_strategy, st.randoms(use_true_random=False))
def test_partition_is_complete_sorted_and_independent_of_input_order(
    jobs: list[Waiting], random: Random
) -> None:
    found = order(jobs, ENGINES, 0.0)
    assert sorted(found.on_time + found.late, key=lambda j: j.id) == sorted(
        jobs, key=lambda j: j.id
    )
    deadlines = [each.deadline_s for each in found.on_time]
    assert deadlines == sorted(deadlines)
    arrivals = [each.arrival_s for each in found.late]
    assert arrivals == sorted(arrivals)
    shuffled = list(jobs)
    random.shuffle(shuffled)
    assert order(shuffled, ENGINES, 0.0) == found


def test_the_removed_one_is_the_longest_so_far() -> None:
    long, short, urgent = job("long", 5, 6), job("short", 1, 7), job("urgent", 3, 8)
    assert order([long, short, urgent], ENGINES, 0.0) == AdmissionOrder((short, urgent), (long,))


def test_what_cannot_be_on_time_even_alone_pushes_nobody_out() -> None:
    hopeless, short = job("hopeless", 1, 2, model="coming"), job("short", 2, 3)
    engines = {**ENGINES, "coming": engine("coming", ready_in_s=1.5)}
    assert order([hopeless, short], engines, 0.0) == AdmissionOrder((short,), (hopeless,))
    engines["coming"] = engine("coming", ready_in_s=1.0)
    assert order([hopeless, short], engines, 0.0).on_time[0].id == "hopeless"


def test_first_come_first_served_ignores_deadlines() -> None:
    late, urgent = job("late", 9, 1, arrival_s=1), job("urgent", 1, 5, arrival_s=2)
    assert fcfs.order([urgent, late], ENGINES, 3.0, 1.0) == AdmissionOrder((late, urgent), ())


def test_no_requests() -> None:
    assert order([], ENGINES, 5.0, 1.0) == AdmissionOrder((), ())
