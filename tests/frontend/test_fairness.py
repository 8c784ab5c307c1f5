"""Other models keep their part of the frontend while one model's requests flood it."""

from __future__ import annotations

import random
from itertools import count

import pytest

from prism.frontend.dispatch.request_log import Mailbox, OpenRequest, RequestLog
from prism.frontend.http.error_bodies import OverloadedError
from prism.messages.requests import Request, Sampling

_numbers = count()


def opened(model: str, number: int = 1) -> list[OpenRequest]:
    mailbox = Mailbox()
    return [
        OpenRequest(
            Request(f"r{next(_numbers)}", model, [1], Sampling(1), 0.0, 1.0, 1.0, "f"),
            choice,
            mailbox,
        )
        for choice in range(number)
    ]


def fill(log: RequestLog, model: str) -> list[OpenRequest]:
    """Adds requests of the model until the log is full for it; returns them."""
    taken: list[OpenRequest] = []
    while True:
        entries = opened(model)
        try:
            log.add(entries)
        except OverloadedError:
            return taken
        taken += entries


def test_a_flood_leaves_each_other_model_its_part() -> None:
    log = RequestLog(80, models=4)
    assert len(fill(log, "a")) == 50  # 40, and its own part of 10
    assert [len(fill(log, model)) for model in "bcd"] == [10, 10, 10]
    assert len(log) == 80


def test_a_model_alone_may_take_all() -> None:
    assert len(fill(RequestLog(80), "a")) == 80


def test_what_ends_makes_room_for_any_model_again() -> None:
    log = RequestLog(80, models=4)
    taken = fill(log, "a")
    for entry in taken[:20]:
        log.close(entry.request.id)
        log.close(entry.request.id)  # a second time changes nothing
    assert len(fill(log, "b")) == 30


def test_all_choices_of_a_request_or_none() -> None:
    log = RequestLog(80, models=4)
    with pytest.raises(OverloadedError, match="30 are reserved for other models"):
        log.add(opened("a", 51))
    assert len(log) == 0
    log.add(opened("a", 50))


def test_random_arrivals_never_take_anothers_part() -> None:
    """Finds room for each model below its part, whichever requests came and went before."""
    chance = random.Random(1)
    log, here = RequestLog(100, models=5), dict[str, list[OpenRequest]]()
    for _ in range(3000):
        model = chance.choice("aaaaaaabcde")
        mine = here.setdefault(model, [])
        if mine and chance.random() < 0.3:
            log.close(mine.pop().request.id)
            continue
        entries = opened(model)
        try:
            log.add(entries)
            mine += entries
        except OverloadedError:
            assert len(mine) >= 10
        assert len(log) == sum(map(len, here.values())) <= 100
