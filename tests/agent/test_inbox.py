"""Handling of engines' messages by the agent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvcached.errors import LedgerCorruptError
from prism.agent.inbox import EngineInbox
from prism.agent.state.engine_pool import EngineProcess
from prism.engines.processes.worker import Worker
from prism.errors import EngineError, RequestsFailedError


@pytest.mark.parametrize(
    ("error", "by_request"),
    [
        (RequestsFailedError("no memory"), False),
        (LedgerCorruptError("locked for too long by process 7, which is stopped"), False),
        (EngineError("broken"), True),
    ],
)
def test_a_crash_that_is_no_requests_fault_or_a_named_ones_makes_no_suspects(
    error: Exception, by_request: bool
) -> None:
    deaths: list[bool] = []

    def engine_died(engine_id: str, why: str, by_request: bool) -> None:
        deaths.append(by_request)

    engine = EngineProcess("e0", 0.0, 0.0)
    lifecycle = SimpleNamespace(engine_died=engine_died)
    inbox = EngineInbox(*cast("Any", (None, None, lifecycle, None, None)))
    link = SimpleNamespace(send=lambda output: inbox._take(engine, output))
    worker = Worker(*cast("Any", (None, link, engine.id)))
    worker._open = {"survivor": 1}
    worker._report_crash(error)
    assert deaths == [by_request]
