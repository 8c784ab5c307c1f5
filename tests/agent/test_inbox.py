"""What the agent makes of engines' messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from prism.agent.inbox import EngineInbox
from prism.agent.pool import EngineProcess
from prism.engines.worker import Worker
from prism.errors import EngineError, RequestsFailedError


@pytest.mark.parametrize(("named", "by_request"), [(True, False), (False, True)])
def test_a_crash_whose_culprits_have_failed_by_name_makes_no_suspects(
    named: bool, by_request: bool
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
    worker._report_crash(RequestsFailedError("no memory") if named else EngineError("broken"))
    assert deaths == [by_request]
