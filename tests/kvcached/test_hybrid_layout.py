"""Arithmetic of hybrid layouts: groups, windows, and the tokens that a sequence keeps."""

from __future__ import annotations

from typing import Any

import pytest

from kvcached import HybridLayout, LayerGroup, Layout, errors

from .conftest import PAGE

ALL = Layout(num_layers=6, num_kv_heads=1, head_dim=128, dtype="float32", block_tokens=16)
HYBRID = HybridLayout.sliding(ALL, [0, 1, 2, 3, 4], 256)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: HybridLayout(()), "groups must be a tuple"),
        (lambda: HybridLayout([LayerGroup("a", (0,), Layout(1, 1, 8))]), "groups must be a tuple"),
        (lambda: HybridLayout((LayerGroup("a", (1,), Layout(1, 1, 8)),)), "each of 0"),
        (lambda: HybridLayout((LayerGroup("a", (0,), Layout(1, 1, 8)),) * 2), "must be unique"),
        (lambda: LayerGroup("a", (0, 1), Layout(1, 1, 8)), "has 2 layers"),
        (lambda: LayerGroup("", (0,), Layout(1, 1, 8)), "must not be empty"),
        (lambda: LayerGroup("a", (0,), Layout(1, 1, 8), 0), "window_tokens"),
        (lambda: HybridLayout.sliding(ALL, [], 8), "and not all"),
        (lambda: HybridLayout.sliding(ALL, range(6), 8), "and not all"),
        (lambda: HybridLayout.sliding(ALL, [6], 8), "and not all"),
    ],
)
def test_impossible_groups_are_refused(make: Any, says: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=says):
        make()


def test_what_a_window_keeps() -> None:
    full, window = HYBRID.groups
    assert [window.dead_blocks(n) for n in (0, 256, 271, 272, 288, 1024)] == [0, 0, 0, 1, 2, 48]
    assert full.dead_blocks(1 << 20) == 0
    assert [window.live_tokens_max(n) for n in (0, 1, 16, 100, 1 << 20)] == [0, 16, 16, 112, 272]
    for step in (1, 5, 16, 64):
        most = 0
        for tokens in range(0, 2000, step):
            blocks = -(-(tokens + step) // 16) - window.dead_blocks(tokens)
            most = max(most, blocks * 16)
        assert most <= window.live_tokens_max(1 << 20, step) <= most + 16
    assert full.live_tokens_max(100, 64) == 112
    assert HYBRID.token_bytes == ALL.token_bytes
    assert HYBRID.quantum_bytes(PAGE) == sum(
        group.layout.quantum_bytes(PAGE) for group in HYBRID.groups
    )
