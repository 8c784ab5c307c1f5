"""The model of a stream detects wrong streams, and a seed determines the schedule."""

from __future__ import annotations

import pytest

from tests.chaos.faults import schedule
from tests.chaos.load import Asked, Stream, varied, verdict

ASKED = Asked("a", (5, 6, 7), 4)
TOKENS = ASKED.expected[0]


def seen(ids: list[int], reason: str | None = "length", ended: bool = True) -> Stream:
    return Stream(ASKED, 0.0, ids=ids, reason=reason, usage=len(ids), ended=ended)


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (seen(TOKENS), "whole"),
        (seen(TOKENS[:2] + TOKENS[1:]), "wrong"),
        (seen(TOKENS[:1] + TOKENS[2:]), "wrong"),
        (seen([*TOKENS, TOKENS[0]]), "wrong"),
        (seen(TOKENS[:3]), "wrong"),
        (seen(TOKENS, "stop"), "wrong"),
        (seen(TOKENS[:3], None, ended=False), "cut"),
        (Stream(ASKED, 0.0, ids=TOKENS[:1], error="engine_died", ended=True), "named"),
        (Stream(ASKED, 0.0, ids=TOKENS[1:2], error="engine_died", ended=True), "wrong"),
        (Stream(ASKED, 0.0, ids=TOKENS[:2], end_s=1e4), "lost"),
    ],
)
def test_verdicts(stream: Stream, said: str) -> None:
    assert verdict(stream) == said


def test_a_stop_token_ends_a_stream() -> None:
    asked = Asked("a", (5, 6, 7), 4, stop_ids=(TOKENS[2],))
    assert asked.expected == (TOKENS[:3], "stop")


def test_the_seed_decides_everything() -> None:
    counts = {("kill", "engine", 0.0): 5, ("stop", "agent", 5.0): 5}
    assert schedule(3, counts) == schedule(3, counts) != schedule(4, counts)
    assert [varied(3, "ab", n) for n in range(9)] == [varied(3, "ab", n) for n in range(9)]
