"""KV of running requests to the agent of another machine, part by part.

The target acknowledges each part, and at last says where the file lies there. Nothing depends on
it: KV that is not there in time is computed again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

from msgspec import structs

from prism.agent.sockets import PeerLinks
from prism.messages.kv import KvPart, KvTaken
from prism.messages.requests import Request, Resume
from prism.tasks import cancel_all

PART_BYTES = 256 << 10  # copied in a turn of the loop, and encrypted in about half a millisecond
UNACKNOWLEDGED_BYTES_MAX = 16 * PART_BYTES
# A file has to be there after LEAST_S and SLACK times as long as the network takes for it.
LEAST_S, SLACK = 2.0, 4.0

log = logging.getLogger(__name__)

GoOn = Callable[[Request], None]


class _Transfer:
    def __init__(self) -> None:
        self.answer = KvTaken("")
        self.news = asyncio.Event()


class KvSender:
    """One file at a time, so that each has the network to itself. For one event loop. device: whose
    agent this is. wanted: whether a request has not ended meanwhile."""

    def __init__(self, peers: PeerLinks, device: str, wanted: Callable[[Request], bool]) -> None:
        self._peers = peers
        self._device = device
        self._wanted = wanted
        self._turn = asyncio.Lock()
        self._transfers: dict[str, _Transfer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, requests: Sequence[Request], target: str, go_on: GoOn) -> None:
        """Requests with KV in files. Each goes on as soon as that is on the machine of `target`, or
        without KV: if it does not come in time, so do all behind it. The files here go."""
        task = asyncio.create_task(self._send_all(list(requests), target, go_on))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def answered(self, answer: KvTaken) -> None:
        """Answers about files that are not on their way any more are ignored."""
        if (transfer := self._transfers.get(answer.name)) is not None:
            transfer.answer = answer
            transfer.news.set()

    async def close(self) -> None:
        """What has not come goes on without KV."""
        await cancel_all(self._tasks)

    async def _send_all(self, left: list[Request], target: str, go_on: GoOn) -> None:
        try:
            while left:
                async with self._turn:
                    path = await self._send(left[0], target)
                go_on(_with_kv(left.pop(0), path, target))
        except (OSError, TimeoutError) as error:
            why = str(error) or "it did not come in time"
            log.warning("KV of %d requests is computed again on %s: %s", len(left), target, why)
            self._peers.drop(target)
        finally:
            for request in left:
                _remove(_path_of(request))
                go_on(_with_kv(request, "", target))

    async def _send(self, request: Request, target: str) -> str:
        """Where it lies there; "" where it is not wanted any more. Raises OSError, TimeoutError."""
        path = _path_of(request)
        try:
            with path.open("rb", buffering=0) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                network_s = size_bytes / self._peers.network_bytes_s(target)
                async with asyncio.timeout(LEAST_S + SLACK * network_s):
                    return await self._push(file, size_bytes, request, target)
        finally:
            _remove(path)

    async def _push(self, file: FileIO, size_bytes: int, request: Request, target: str) -> str:
        name, sent_bytes, began_s = _path_of(request).name, 0, time.monotonic()
        transfer = self._transfers[name] = _Transfer()
        try:
            while not transfer.answer.path and self._wanted(request):
                open_bytes = sent_bytes - transfer.answer.taken_bytes
                if sent_bytes < size_bytes and open_bytes < UNACKNOWLEDGED_BYTES_MAX:
                    part = KvPart(self._device, name, size_bytes, sent_bytes, file.read(PART_BYTES))
                    self._peers.send(target, part)
                    sent_bytes += len(part.data)
                    await asyncio.sleep(0)
                else:
                    await transfer.news.wait()
                transfer.news.clear()
                if transfer.answer.problem:
                    raise ConnectionError(transfer.answer.problem)
            return transfer.answer.path
        finally:
            del self._transfers[name]
            taken_bytes, seconds = transfer.answer.taken_bytes, time.monotonic() - began_s
            self._peers.measured(target, taken_bytes, seconds)


def _path_of(request: Request) -> Path:
    assert request.resume is not None
    return Path(request.resume.kv_path)


def _with_kv(request: Request, path: str, device: str) -> Request:
    """path: on the machine of `device`; empty: it is computed again."""
    resume = request.resume
    assert resume is not None
    if path:
        resume = structs.replace(resume, kv_path=path, kv_device=device)
    else:
        resume = Resume(resume.output_ids)
    return structs.replace(request, resume=resume)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
