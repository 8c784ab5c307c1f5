"""The speeds that engines measure."""

from __future__ import annotations

import numpy as np
import pytest

from prism.models.prefill_speed import Speed, StepTimes


def test_long_prefills_weigh_more_than_short_ones() -> None:
    speed = Speed()
    assert speed.tokens_per_s == 0.0
    speed.add(1000, 1.0)
    speed.add(10, 0.25)
    assert speed.tokens_per_s == pytest.approx((0.8 * 1000 + 10) / (0.8 * 1.0 + 0.25))


def test_old_ones_are_forgotten() -> None:
    speed = Speed()
    speed.add(1000, 1.0)
    for _ in range(60):
        speed.add(100, 1.0)
    assert speed.tokens_per_s == pytest.approx(100.0, rel=0.01)


def test_steps_are_a_line_over_their_requests() -> None:
    rng, times = np.random.default_rng(5), StepTimes()
    for _ in range(500):
        requests = int(rng.integers(1, 16))
        times.add(requests, 0.01 + 0.001 * requests + float(rng.normal(0.0, 0.0005)))
    assert times.step_s == pytest.approx(0.01, rel=0.05)
    assert times.request_s == pytest.approx(0.001, rel=0.05)
    for _ in range(2000):  # slower now
        times.add(int(rng.integers(1, 16)), 0.05)
    assert times.step_s == pytest.approx(0.05, rel=0.01)
    assert times.request_s == pytest.approx(0.0, abs=1e-5)


def test_steps_of_one_number_of_requests_have_no_slope() -> None:
    times = StepTimes()
    for seconds in (0.01, 0.03, 0.02) * 100:
        times.add(4, seconds)
    assert (times.step_s, times.request_s) == (pytest.approx(0.02, rel=0.01), 0.0)
    times.add(1, 0.5)  # a longer step of fewer requests
    assert times.request_s == 0.0
    assert times.step_s > 0.02


def test_neither_part_of_a_step_is_negative() -> None:
    times = StepTimes()
    for requests in (1, 2, 3, 4) * 50:
        times.add(requests, 0.01 * requests * requests)
    assert times.step_s >= 0.0
    assert times.request_s > 0.01
