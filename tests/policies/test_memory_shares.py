"""Division of a device's KV memory between servers that admit requests themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.policies.planning.memory_shares import MemoryShare, ServerDemand, memory_shares

MIB = 1 << 20


def busy(wanted: int, slo_tpot_s: float = 0.1, floor: int = 10) -> ServerDemand:
    return ServerDemand(floor * MIB, wanted * MIB, slo_tpot_s)


def idle(held: int, floor: int = 10) -> ServerDemand:
    return ServerDemand(floor * MIB, 0, 0.1, held * MIB)


def limits(room: int, *demands: ServerDemand) -> list[int]:
    return [share.limit_bytes // MIB for share in memory_shares(room * MIB, demands)]


def test_a_burst_gets_an_idle_servers_memory_but_its_floor() -> None:
    assert limits(100, busy(300), idle(90)) == [90, 10]


def test_an_idle_server_keeps_what_nobody_wants() -> None:
    assert limits(100, busy(30), idle(60)) == [40, 60]


def test_what_is_left_goes_to_the_busy_server() -> None:
    assert limits(100, busy(30), idle(20)) == [80, 20]


def test_room_that_both_want_is_divided_by_pressure() -> None:
    """Has twice the KV of a request over four times the SLO: half of the pressure, however many
    requests there are."""
    one, other = limits(130, busy(200, 0.1), busy(4000, 0.4, floor=20))
    assert (one, other) == pytest.approx((10 + 100 * 2 / 3, 20 + 100 / 3), abs=1)


def test_a_server_that_wants_less_than_its_part_leaves_the_rest() -> None:
    assert limits(100, busy(15), busy(400)) == [15, 85]


def test_an_operators_limit_holds() -> None:
    limited = ServerDemand(10 * MIB, 300 * MIB, 0.1, most_bytes=40 * MIB)
    assert limits(100, limited, idle(90)) == [40, 60]


def test_a_server_is_guaranteed_what_it_wants_within_its_limit() -> None:
    shares = memory_shares(100 * MIB, [busy(30), idle(20), busy(5)])
    assert [share.min_bytes // MIB for share in shares] == [30, 10, 10]


demands = st.builds(
    ServerDemand,
    floor_bytes=st.integers(0, 50 * MIB),
    wanted_bytes=st.integers(0, 1 << 40),
    slo_tpot_s=st.floats(1e-3, 60),
    held_bytes=st.integers(0, 1 << 40),
    most_bytes=st.none() | st.integers(50 * MIB, 1 << 40),
)


@given(st.integers(0, 1 << 40), st.lists(demands, max_size=8))
def test_every_share_is_within_its_bounds(room: int, given: list[ServerDemand]) -> None:
    shares = memory_shares(room, given)
    for share, demand in zip(shares, given, strict=True):
        assert demand.floor_bytes <= share.min_bytes <= share.limit_bytes
        assert demand.most_bytes is None or share.limit_bytes <= demand.most_bytes
    floors = sum(demand.floor_bytes for demand in given)
    assert sum(share.limit_bytes for share in shares) <= max(room, floors)


@given(st.lists(demands, min_size=1, max_size=8))
def test_nobody_is_limited_below_its_wants_while_there_is_room(given: list[ServerDemand]) -> None:
    for share, demand in zip(memory_shares(1 << 45, given), given, strict=True):
        wanted = max(demand.wanted_bytes, demand.floor_bytes)
        most = wanted if demand.most_bytes is None else min(wanted, demand.most_bytes)
        assert share.limit_bytes >= most
        assert share.min_bytes == MemoryShare(most, most).min_bytes
