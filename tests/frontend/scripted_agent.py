"""A test double of an agent: real Redis queue, real sockets and messages, scripted tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import QueueUnavailableError
from prism.messages.requests import Cancel, Chunk, EngineOutput, Failure, Request
from prism.queueing.request_queue import RequestQueue

Script = Callable[[Request], AsyncIterator[Chunk | Failure]]


class ScriptedAgent:
    """Serves its device's queue with `script`, set by the test. `cancelled` and `seen` record
    what the frontend asked for."""

    def __init__(self, config: ClusterConfig, device: str = "host:0") -> None:
        self.config, self.device = config, device
        self.script: Script = silent
        self.seen: list[Request] = []
        self.cancelled: set[str] = set()
        self._queue = RequestQueue.connect(config.redis_url, config.namespace)
        self._context = zmq.asyncio.Context()
        self._pushes: dict[str, zmq.asyncio.Socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._epoch = 0

    async def __aenter__(self) -> ScriptedAgent:
        self._epoch = await self._queue.acquire(self.device, "scripted", ttl_s=60)
        for model in self.config.models:
            await self.route(model.name)
        inbox = self._context.socket(zmq.PULL)
        inbox.bind(self.config.agent_cancel_endpoint(self.device))
        self._spawn(self._take_cancels(inbox))
        self._spawn(self._take_requests())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._queue.close()
        self._context.destroy(linger=0)

    async def route(self, model: str) -> None:
        await self._queue.route(model, self.device)

    async def send(self, frontend_id: str, *items: Chunk | Failure) -> None:
        output = EngineOutput(
            chunks=[i for i in items if isinstance(i, Chunk)],
            failures=[i for i in items if isinstance(i, Failure)],
        )
        if frontend_id not in self._pushes:
            self._pushes[frontend_id] = self._context.socket(zmq.PUSH)
            self._pushes[frontend_id].connect(self.config.frontend_endpoint(frontend_id))
        await self._pushes[frontend_id].send(msgspec.msgpack.encode(output))

    async def _take_requests(self) -> None:
        cursor = left = "0"
        while True:
            entries, left = await self._queue.follow(self.device, cursor, left, 0.5)
            for entry, request in entries:
                cursor = entry
                if await self._queue.admit(self.device, self._epoch, [entry]):
                    self.seen.append(request)
                    self._spawn(self._serve(request))

    async def _serve(self, request: Request) -> None:
        async for item in self.script(request):
            if request.id in self.cancelled:
                break
            await self.send(request.frontend_id, item)
        with suppress(asyncio.CancelledError):
            await self._queue.finish(self.device, self._epoch, [request.id])

    async def _take_cancels(self, inbox: zmq.asyncio.Socket) -> None:
        while True:
            message = msgspec.msgpack.decode(await inbox.recv(), type=Cancel)
            self.cancelled.update(message.request_ids)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(while_redis_lives(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def while_redis_lives(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` and ignores that a test has stopped Redis meanwhile."""
    with suppress(QueueUnavailableError):
        await work


async def silent(request: Request) -> AsyncIterator[Chunk | Failure]:
    """Sends nothing."""
    await asyncio.Event().wait()
    yield died(request)


def tokens(request: Request, first: int, ids: list[int], finish_reason: str | None = None) -> Chunk:
    return Chunk(request.id, request.attempt, first, ids, finish_reason)


def rest(request: Request, ids: list[int]) -> Chunk:
    """Returns the chunk with the rest of `ids` after the output that came with the request."""
    first = len(request.resume.output_ids) if request.resume else 0
    return tokens(request, first, ids[first:], "stop")


def died(request: Request, retryable: bool = True) -> Failure:
    return Failure(request.id, request.attempt, "engine_died", "the engine died", retryable)


def answering(ids: list[int], finish_reason: str = "stop", step: int = 1) -> Script:
    """Returns a script that sends `ids`, `step` at a time, at most max_tokens."""

    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        room = request.sampling.max_tokens
        sent, reason = (ids, finish_reason) if len(ids) <= room else (ids[:room], "length")
        for first in range(0, len(sent), step):
            last = first + step >= len(sent)
            yield tokens(request, first, sent[first : first + step], reason if last else None)
            await asyncio.sleep(0)

    return script
