"""Supervisor of a fork server process, which starts engines until the pool has its size."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from prism.agent.engines.forked_process import ForkedProcess
from prism.agent.engines.lifecycle import Lifecycle
from prism.agent.state.device_state import DeviceState
from prism.agent.state.engine_pool import EngineProcess, EngineState
from prism.errors import EngineError
from prism.messages import MALFORMED_ERRORS
from prism.messages.forking import (
    EngineExited,
    EngineForked,
    ForkEngine,
    ForkServerReady,
    FromForkServer,
)
from prism.process import child_environment
from prism.transport import count_malformed

log = logging.getLogger(__name__)


STARTS_MAX = 3


class ForkServerClient:
    """Client of one fork server process, which ends with its stdin, as do its engines."""

    def __init__(self, process: Process | ForkedProcess) -> None:
        self._process = process
        self._decoder = msgspec.json.Decoder(FromForkServer)

    @classmethod
    async def start(
        cls,
        adapter: str,
        config_path: Path,
        device: str,
        preloaded: Path | None = None,
        python: str = sys.executable,
    ) -> ForkServerClient:
        """Starts a fork server, whose first event is `ForkServerReady`.

        Args:
            adapter: the engine adapter to import.
            config_path: the resolved cluster.json.
            device: the device's local name.
            preloaded: socket of the process to fork the server from. None starts a new interpreter,
                which does the imports itself.
            python: the interpreter for that.
        """
        if preloaded is not None:
            return cls(await ForkedProcess.start(preloaded))
        process = await asyncio.create_subprocess_exec(
            python,
            "-P",
            "-m",
            "prism.engines.processes.forkserver",
            "--adapter",
            adapter,
            "--config",
            str(config_path),
            "--device",
            device,
            stdin=PIPE,
            stdout=PIPE,
            env=child_environment(),
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, order: ForkEngine) -> None:
        """Orders one more engine. If the fork server has ended, only `event` reports that."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")

    async def event(self) -> FromForkServer | None:
        """Returns the next event, or None if the fork server has ended."""
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
                if not line:
                    return None
                event: FromForkServer = self._decoder.decode(line)
            # ValueError: the line exceeds asyncio's limit.
            except (*MALFORMED_ERRORS, ValueError) as error:
                count_malformed()
                log.warning("dropped a malformed line of the fork server: %s", error)
            else:
                return event

    def kill(self) -> None:
        """Kills the fork server and its engines. `event` then returns None."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self, timeout_s: float) -> int:
        """Ends the fork server and its engines, after `timeout_s` with SIGKILL.

        Returns its exit status.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            log.warning("the fork server did not end within %g s", timeout_s)
            self._process.kill()
        return await self._process.wait()


Start = Callable[[], Coroutine[Any, Any, ForkServerClient]]


class ForkServerSupervisor:
    """Supervisor of one adapter's fork server.

    A fork server that ends is started again, and engines that end are replaced. A fork server that
    hangs is killed only if it does not fork in time, because its engines do not need it.
    """

    def __init__(
        self, state: DeviceState, lifecycle: Lifecycle, start: Start, adapter: str = ""
    ) -> None:
        self._state = state
        self._pool = state.pool
        self._adapter = adapter or state.pool.adapters[0]
        self._timing = state.timing
        self._now_s = state.now_s
        self._lifecycle = lifecycle
        self._start = start
        self._client: ForkServerClient | None = None
        self._hung: ForkServerClient | None = None
        self._ready = False
        self._failed_starts = 0  # engines in a row that ended before they were ready
        self._fork_at_s = float("-inf")
        self._started_s = 0.0

    async def run(self) -> None:
        """Raises EngineError if the fork server ends STARTS_MAX times in a row before it is ready.

        Does not return otherwise.
        """
        failures = 0
        while failures < STARTS_MAX:
            self._client, self._started_s = await self._start(), self._now_s()
            was_ready = await self._follow(self._client)
            await self._client.stop(self._timing.fork_server_stop_s)
            failures = 0 if was_ready else failures + 1
            for engine in self._engines():
                engine.ended = True  # engines die with their fork server
                self._lifecycle.engine_died(engine.id, "the fork server ended", by_request=False)
            await asyncio.sleep(self._timing.fork_retry_s)
        raise EngineError("the fork server ends before it is ready; see its messages above")

    async def _follow(self, client: ForkServerClient) -> bool:
        """Handles events until the fork server ends. Returns whether it was ever ready."""
        was_ready = False
        while (event := await client.event()) is not None:
            was_ready = was_ready or isinstance(event, ForkServerReady)
            self._take(event)
        self._ready = False
        log.error("the fork server (pid %d) ended", client.pid)
        return was_ready

    def _take(self, event: FromForkServer) -> None:
        match event:
            case ForkServerReady(import_s=import_s):
                log.info("the fork server of %s is ready after %.1f s", self._adapter, import_s)
                self._ready = True
                self._pool.import_s = max(import_s, self._pool.import_s)
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
        # The engine was removed, and perhaps replaced, before its pid was known.
        log.warning("%s (pid %d) was forked too late and is killed", engine_id, pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _exited(self, engine_id: str, status: int) -> None:
        engine = self._pool.get(engine_id)
        if engine is not None and engine.state is EngineState.STARTING:
            self._pause_forks()
        else:
            self._failed_starts = 0
        if engine is not None:
            engine.ended = True
        self._lifecycle.engine_died(engine_id, f"it ended with status {status}")
        self.tick()

    def _pause_forks(self) -> None:
        """Delays the next fork, exponentially: a successor would probably end the same way."""
        pause_s = self._timing.fork_retry_s * 2.0**self._failed_starts
        self._fork_at_s = self._now_s() + min(pause_s, self._timing.fork_retry_max_s)
        self._failed_starts += 1

    def tick(self) -> None:
        """Orders missing engines. REQUIRES: `Lifecycle.tick` has discounted own suspensions."""
        self._kill_if_hung()
        if not self._ready or self._client is None or self._now_s() < self._fork_at_s:
            return
        while self._pool.is_short:
            if (kind := self._state.next_kind(self._adapter)) is None:
                break
            engine = self._pool.create(self._now_s(), kind)
            self._client.fork(ForkEngine(engine.id, engine.sm_percent, kind.peers))

    def _engines(self) -> list[EngineProcess]:
        return [engine for engine in self._pool if engine.kind.adapter == self._adapter]

    def _kill_if_hung(self) -> None:
        now_s = self._now_s()
        unforked = [now_s - engine.seen_s for engine in self._engines() if not engine.pid]
        too_late = max(unforked, default=0.0) > self._timing.fork_answer_s
        if not self._ready:
            too_late = now_s - self._started_s > self._timing.fork_ready_s
        if too_late and self._client is not None and self._hung is not self._client:
            log.error("the fork server (pid %d) hangs and is killed", self._client.pid)
            self._hung = self._client
            self._client.kill()

    async def stop(self) -> None:
        self._ready = False
        if self._client is not None:
            await self._client.stop(self._timing.fork_server_stop_s)
