"""A Redis that stays away is reported once, not at every try."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from prism.agent.intake import Intake
from prism.agent.timing import Timing
from prism.agent.turns import Turns
from prism.errors import QueueUnavailableError
from prism.queueing import RequestQueue
from tests.agent.harness import until

TIMING = Timing(retry_s=0.01)


class Tried:
    """Serving that has something to tell Redis, and cannot."""

    has_waiting = True
    epoch = 0
    turns = 0

    async def turn(self, epoch: int) -> None:
        self.turns += 1
        raise QueueUnavailableError("Redis does not answer")


async def run_until(condition: Callable[[], object], loop: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(loop)
    await until(lambda: task.done() or condition())
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


async def test_the_loop_of_turns(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "prism.agent")
    serving: Any = Tried()
    await run_until(lambda: serving.turns >= 3, Turns(serving, TIMING).run(serving))
    assert len(caplog.records) == 1


async def test_the_intake(short_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "prism.agent")
    queue = RequestQueue.connect(f"unix://{short_dir}/none.sock", "n")
    unused: Any = None
    intake = Intake(queue, "host:0", TIMING, unused, unused)
    await run_until(lambda: len(caplog.records) >= 3, intake.run())
    await queue.close()
    loud, *quiet = [record.levelno for record in caplog.records]
    assert loud == logging.WARNING
    assert set(quiet) == {logging.DEBUG}
