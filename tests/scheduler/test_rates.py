"""Token rates from counters: window, restarts, first sight."""

from __future__ import annotations

import pytest

from prism.scheduler.rates import TokenRates


def test_tokens_of_the_window_over_its_length() -> None:
    rates = TokenRates(10.0)
    for second in range(21):
        rates.observe("g", 1, {"a": 100 * second, "b": 5}, float(second))
    assert rates.rates(20.0) == {"a": pytest.approx(100.0)}


def test_a_young_window_is_divided_by_its_age() -> None:
    rates = TokenRates(60.0)
    rates.observe("g", 1, {"a": 0}, 0.0)
    rates.observe("g", 1, {"a": 40}, 4.0)
    assert rates.rates(4.0) == {"a": 10.0}
    rates = TokenRates(60.0)
    rates.observe("g", 1, {"a": 0}, 0.0)
    rates.observe("g", 1, {"a": 40}, 0.1)
    assert rates.rates(0.1) == {"a": 40.0}


def test_history_before_the_first_sight_does_not_count() -> None:
    rates = TokenRates(10.0)
    rates.observe("g", 1, {"a": 10**6}, 0.0)
    assert rates.rates(0.0) == {}
    rates.observe("g", 1, {"a": 10**6, "new": 30}, 1.0)
    assert rates.rates(1.0) == {"new": 30.0}


def test_an_agent_that_restarts_counts_from_zero() -> None:
    rates = TokenRates(10.0)
    rates.observe("g", 1, {"a": 500, "b": 500}, 0.0)
    rates.observe("g", 2, {"b": 30}, 1.0)
    rates.observe("g", 2, {"a": 700, "b": 30}, 1.0)
    assert rates.rates(1.0) == {"a": 700.0, "b": 30.0}


def test_an_agent_that_takes_its_lease_anew_goes_on_counting() -> None:
    rates = TokenRates(10.0)
    rates.observe("g", 1, {"a": 500}, 0.0)
    rates.observe("g", 2, {"a": 504}, 1.0)
    assert rates.rates(1.0) == {"a": 4.0}


def test_a_counter_that_falls_starts_again() -> None:
    rates = TokenRates(10.0)
    rates.observe("g", 1, {"a": 500}, 0.0)
    rates.observe("g", 1, {"a": 20}, 1.0)
    rates.observe("g", 1, {"a": 50}, 2.0)
    assert rates.rates(2.0) == {"a": 25.0}


def test_devices_add_up_and_old_tokens_leave() -> None:
    rates = TokenRates(10.0)
    rates.observe("g0", 1, {"a": 0}, 0.0)
    rates.observe("g1", 1, {"a": 0}, 0.0)
    rates.observe("g0", 1, {"a": 60}, 5.0)
    rates.observe("g1", 1, {"a": 40}, 10.0)
    assert rates.rates(10.0) == {"a": 10.0}
    assert rates.rates(15.0) == {"a": 4.0}
    assert rates.rates(99.0) == {}
