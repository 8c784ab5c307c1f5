"""Sources of weights: the node's own store, the fastest peer that has them, or the disk."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.models.weight_source import WeightSource, weight_source

DISK = 100.0


@pytest.mark.parametrize(
    ("held", "links", "source"),
    [
        (True, {"b": 1e9}, WeightSource("store")),
        (False, {}, WeightSource("disk", bytes_s=DISK)),
        (False, {"b": 99.0}, WeightSource("disk", bytes_s=DISK)),
        (False, {"b": DISK}, WeightSource("disk", bytes_s=DISK)),
        (False, {"b": 101.0}, WeightSource("peer", "b", 101.0)),
        (False, {"b": 101.0, "c": 200.0, "d": 200.0}, WeightSource("peer", "c", 200.0)),
        (False, {"b": 50.0, "c": 200.0}, WeightSource("peer", "c", 200.0)),
    ],
)
def test_the_fastest(held: bool, links: Mapping[str, float], source: WeightSource) -> None:
    assert weight_source(held, links, DISK) == source


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 1e12)),
    st.floats(0.1, 1e12),
)
def test_nothing_is_faster(links: dict[str, float], disk_bytes_s: float) -> None:
    source = weight_source(False, links, disk_bytes_s)
    assert source.bytes_s == max([*links.values(), disk_bytes_s])
    assert source.kind == "disk" or links[source.node] == source.bytes_s
