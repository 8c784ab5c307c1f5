"""Lasting faults are logged once: a Redis outage, a request table that contradicts itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from prism.agent.requests import admission as admission_module
from prism.agent.requests.admission import AdmissionLoop
from prism.agent.requests.queue import QueueReader
from prism.agent.state.device_state import AgentTiming, DeviceState
from prism.agent.state.engine_pool import EnginePool
from prism.agent.state.request_table import TrackedRequest
from prism.errors import QueueUnavailableError
from prism.queueing import RequestQueue
from tests.agent.harness import until
from tests.queueing.requests import request

TIMING = AgentTiming(retry_s=0.01)


class Tried:
    """Lease and admission whose write to Redis fails."""

    epoch = 0
    lock = asyncio.Lock()
    turns = 0

    async def step(self, epoch: int) -> None:
        self.turns += 1
        raise QueueUnavailableError("Redis does not answer")


class Idle:
    """Lease and admission without work."""

    epoch = 0
    lock = asyncio.Lock()
    turns = 0

    async def step(self, epoch: int) -> None:
        self.turns += 1


async def run_until(condition: Callable[[], object], loop: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(loop)
    await until(lambda: task.done() or condition())
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


async def test_the_admission_loop(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "prism.agent")
    admission: Any = Tried()
    state = DeviceState(EnginePool("host:0", 1), TIMING)
    state.requests.wake()
    await run_until(lambda: admission.turns >= 3, AdmissionLoop(admission, admission, state).run())
    assert len(caplog.records) == 1


async def test_a_contradiction(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_module, "IDLE_S", 0.001)
    state = DeviceState(EnginePool("host:0", 1), TIMING)
    state.requests.start(TrackedRequest(request("1")), "gone", 16)
    admission: Any = Idle()
    await run_until(lambda: admission.turns >= 3, AdmissionLoop(admission, admission, state).run())
    assert [record.getMessage() for record in caplog.records] == [
        "the table of requests is inconsistent: 1 (running): its engine 'gone' is gone"
    ]


async def test_the_reader_of_the_queue(short_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "prism.agent")
    queue = RequestQueue.connect(f"unix://{short_dir}/none.sock", "n")
    unused: Any = None
    reader = QueueReader(
        queue, "host:0", TIMING, on_entry=unused, on_replayed=unused, set_aside=unused
    )
    await run_until(lambda: len(caplog.records) >= 3, reader.run())
    await queue.close()
    loud, *quiet = [record.levelno for record in caplog.records]
    assert loud == logging.WARNING
    assert set(quiet) == {logging.DEBUG}
