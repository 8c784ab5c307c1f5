"""Keeps the nursery running and the pool at its size."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from prism.agent.lifecycle import Lifecycle
from prism.agent.nursery_client import NurseryClient
from prism.agent.pool import EngineState
from prism.agent.state import State
from prism.errors import EngineError
from prism.nursery_messages import (
    EngineExited,
    EngineForked,
    ForkEngine,
    FromNursery,
    NurseryReady,
)

log = logging.getLogger(__name__)

STARTS_MAX = 3

Start = Callable[[], Coroutine[Any, Any, NurseryClient]]


class Nursery:
    """A nursery that ends is started again; engines that end are replaced.

    Raises EngineError from `run` when it ends STARTS_MAX times in a row before it is ready.
    """

    def __init__(self, state: State, lifecycle: Lifecycle, start: Start) -> None:
        self._pool = state.pool
        self._timing = state.timing
        self._now_s = state.now_s
        self._lifecycle = lifecycle
        self._start = start
        self._client: NurseryClient | None = None
        self._ready = False
        self._stillborn = 0
        self._fork_at_s = float("-inf")

    async def run(self) -> None:
        failures = 0
        while failures < STARTS_MAX:
            self._client = await self._start()
            was_ready = await self._follow(self._client)
            await self._client.stop(self._timing.nursery_stop_s)
            failures = 0 if was_ready else failures + 1
            for engine in self._pool:
                engine.ended = True  # engines die with their nursery
                self._lifecycle.engine_died(engine.id, "the nursery ended")
            await asyncio.sleep(self._timing.fork_retry_s)
        raise EngineError(
            "the nursery of the engine processes ends before it is ready; its messages are above"
        )

    async def _follow(self, client: NurseryClient) -> bool:
        """Its events until it ends; whether it ever was ready."""
        was_ready = False
        while (event := await client.event()) is not None:
            was_ready = was_ready or isinstance(event, NurseryReady)
            self._take(event)
        self._ready = False
        log.error("the nursery (pid %d) ended", client.pid)
        return was_ready

    def _take(self, event: FromNursery) -> None:
        match event:
            case NurseryReady(import_s=import_s):
                log.info("the nursery is ready after %.1f s of imports", import_s)
                self._ready = True
                self.tick()
            case EngineForked(engine_id=engine_id, pid=pid):
                self._forked(engine_id, pid)
            case EngineExited(engine_id=engine_id, status=status):
                self._exited(engine_id, status)

    def _forked(self, engine_id: str, pid: int) -> None:
        engine = self._pool.get(engine_id)
        if engine is not None:
            engine.pid = pid
            return
        # It was given up, and perhaps replaced, before it had a process that could be killed.
        log.warning("%s (pid %d) comes too late", engine_id, pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _exited(self, engine_id: str, status: int) -> None:
        engine = self._pool.get(engine_id)
        if engine is not None and engine.state is EngineState.STARTING:
            self._pause_forks()
        else:
            self._stillborn = 0
        if engine is not None:
            engine.ended = True
        self._lifecycle.engine_died(engine_id, f"it ended with status {status}")
        self.tick()

    def _pause_forks(self) -> None:
        """Its successor would most likely end as it did: not at once, and ever later."""
        pause_s = self._timing.fork_retry_s * 2.0**self._stillborn
        self._fork_at_s = self._now_s() + min(pause_s, self._timing.fork_retry_max_s)
        self._stillborn += 1

    def tick(self) -> None:
        """Order the engines that are missing."""
        if not self._ready or self._client is None or self._now_s() < self._fork_at_s:
            return
        while self._pool.is_short:
            engine = self._pool.create(self._now_s(), self._lifecycle.peers_wanted())
            self._client.fork(ForkEngine(engine.id, engine.sm_percent, engine.peers))

    async def stop(self) -> None:
        self._ready = False
        if self._client is not None:
            await self._client.stop(self._timing.nursery_stop_s)
