"""A frontend that retries, for agents under test."""

from __future__ import annotations

import asyncio

import msgspec

from prism.errors import QueueUnavailableError
from prism.messages.requests import EngineOutput, Failure, Request
from tests.agent.harness import Stream, World


class Retrying:
    """Frontend that sends its requests again after failures that may be retried.

    Output of older attempts is dropped.
    """

    def __init__(self, this: World, keeps_blame: bool = True) -> None:
        self._world = this
        self._keeps_blame = keeps_blame
        self.open: dict[str, Request] = {}
        self.retries = 0
        self.ended_by: dict[str, str] = {}  # request id -> the code of its last failure
        self._tasks: set[asyncio.Task[None]] = set()

    async def receive(self) -> None:
        inbox = self._world.frontend._inbox
        while True:
            output = msgspec.msgpack.decode(await inbox.recv(), type=EngineOutput)
            for chunk in output.chunks:
                if self.open[chunk.request_id].attempt == chunk.attempt:
                    self._world.frontend.stream(chunk.request_id).chunks.append(chunk)
            for failure in output.failures:
                if self.open[failure.request_id].attempt == failure.attempt:
                    self._take(failure)

    def _take(self, failure: Failure) -> None:
        request = self.open[failure.request_id]
        if not failure.retryable:
            self.ended_by[request.id] = failure.code
            return
        self.retries += 1
        is_suspect = self._keeps_blame and failure.blame == "suspect"
        suspected_at = failure.output_tokens if is_suspect else None
        changes = {"attempt": request.attempt + 1, "suspected_at": suspected_at}
        self._world.frontend.streams[request.id] = Stream()
        self.send(msgspec.structs.replace(request, **changes))

    def send(self, request: Request) -> None:
        self.open[request.id] = request
        task = asyncio.create_task(self._enqueue(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _enqueue(self, request: Request) -> None:
        while True:
            try:
                await self._world.queue.enqueue(request)
            except QueueUnavailableError:
                await asyncio.sleep(0.05)
            else:
                return
