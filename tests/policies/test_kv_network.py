"""Choice between sending KV to another machine and recomputing it."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from prism.policies.kv_network import sends_kv

RATES = (1e6, 1.25e9, 12.5e9)
SPEEDS = (50.0, 9_000.0, 9_999.0, 80_000.0)
TOKEN_BYTES = (100, 131_072, 327_680)


@pytest.mark.parametrize("tokens", [1, 700, 100_000])
def test_the_shorter_time_is_chosen_whatever_the_length(tokens: int) -> None:
    for token_bytes, speed, rate in product(TOKEN_BYTES, SPEEDS, RATES):
        sending_s = Fraction(tokens * token_bytes) / Fraction(rate)
        computing_s = Fraction(tokens) / Fraction(speed)
        assert sends_kv(token_bytes, speed, rate) is (sending_s < computing_s)


def test_it_is_computed_again_where_both_take_as_long() -> None:
    """Recomputes on a tie, since sending takes memory on both machines."""
    assert not sends_kv(1000, 1000.0, 1e6)
    assert sends_kv(1000, 999.0, 1e6)
