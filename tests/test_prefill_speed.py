"""The prefill speed that admission uses for its estimates."""

from __future__ import annotations

import pytest

from prism.models.prefill_speed import Speed


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
