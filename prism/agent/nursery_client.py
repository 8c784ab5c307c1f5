"""The nursery as a child process: orders and events as JSON lines on its pipes."""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import msgspec

from prism.nursery_messages import ForkEngine, FromNursery
from prism.process import child_environment

log = logging.getLogger(__name__)


class NurseryClient:
    """One nursery process. It ends with its stdin, and its engines with it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._decoder = msgspec.json.Decoder(FromNursery)

    @classmethod
    async def start(cls, adapter: str, config_path: Path, device: str) -> NurseryClient:
        """Returns at once; `NurseryReady` is its first event."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "prism.engines.nursery",
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
        """Order one more engine. A nursery that has just died shows in `event`."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")

    async def event(self) -> FromNursery | None:
        """The next event; None when the nursery has ended."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            try:
                event: FromNursery = self._decoder.decode(line)
            except msgspec.MsgspecError as error:
                log.warning("dropped a malformed line of the nursery: %s", error)
            else:
                return event
        return None

    async def stop(self, timeout_s: float) -> int:
        """End the engines and the nursery; after `timeout_s` with SIGKILL. Returns its status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            log.warning("the nursery did not end within %g s", timeout_s)
            self._process.kill()
        return await self._process.wait()
