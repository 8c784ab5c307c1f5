"""Sender of running requests' KV to the agent of another machine, part by part.

The target acknowledges each part, and after the last one names the file's path there. Nothing
depends on a transfer: KV that does not arrive in time is computed again.
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

from prism.agent.network.sockets import PeerLinks
from prism.messages.kv import KvPart, KvTaken
from prism.messages.requests import Request, Resume
from prism.tasks import cancel_all

PART_BYTES = 256 << 10  # read without a pause of the loop; encrypted in about half a millisecond
UNACKNOWLEDGED_BYTES_MAX = 16 * PART_BYTES
# Time limit of a transfer: LEAST_S + SLACK * (time that the network needs for the file).
LEAST_S, SLACK = 2.0, 4.0

log = logging.getLogger(__name__)

OnMoved = Callable[[Request], None]


class _Transfer:
    def __init__(self) -> None:
        self.answer = KvTaken("")
        self.answered = asyncio.Event()


class KvSender:
    """Sender of one file at a time, so that each has the full network rate. For one event loop.

    Args:
        is_wanted: returns False for a request that has ended meanwhile.
    """

    def __init__(self, peers: PeerLinks, device: str, is_wanted: Callable[[Request], bool]) -> None:
        self._peers = peers
        self._device = device
        self._is_wanted = is_wanted
        self._network = asyncio.Lock()
        self._transfers: dict[str, _Transfer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, requests: Sequence[Request], target: str, on_moved: OnMoved) -> None:
        """Starts to send the KV files of requests to the machine of `target`.

        `on_moved` is called with each request as soon as its file is there. After an error or a
        timeout it is called with this request and all following ones without KV. The local files
        are removed.
        """
        task = asyncio.create_task(self._send_all(list(requests), target, on_moved))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def answered(self, answer: KvTaken) -> None:
        """Handles an answer. Answers about files that are not being sent are ignored."""
        if (transfer := self._transfers.get(answer.name)) is not None:
            transfer.answer = answer
            transfer.answered.set()

    async def close(self) -> None:
        """Stops all transfers. Their requests move without KV."""
        await cancel_all(self._tasks)

    async def _send_all(self, left: list[Request], target: str, on_moved: OnMoved) -> None:
        try:
            while left:
                async with self._network:
                    path = await self._send(left[0], target)
                on_moved(_with_kv(left.pop(0), path, target))
        except (OSError, TimeoutError) as error:
            why = str(error) or "it did not arrive in time"
            log.warning("KV of %d requests is computed again on %s: %s", len(left), target, why)
            self._peers.drop(target)
        finally:
            for request in left:
                _remove(_path_of(request))
                on_moved(_with_kv(request, "", target))

    async def _send(self, request: Request, target: str) -> str:
        """Sends one file and returns its path on the target, or "" if the request has ended.

        Raises OSError or TimeoutError.
        """
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
            while not transfer.answer.path and self._is_wanted(request):
                open_bytes = sent_bytes - transfer.answer.taken_bytes
                if sent_bytes < size_bytes and open_bytes < UNACKNOWLEDGED_BYTES_MAX:
                    part = KvPart(self._device, name, size_bytes, sent_bytes, file.read(PART_BYTES))
                    self._peers.send(target, part)
                    sent_bytes += len(part.data)
                    await asyncio.sleep(0)
                else:
                    await transfer.answered.wait()
                transfer.answered.clear()
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
    """Returns the request with the path of its KV on `device`'s machine; "" removes its KV."""
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
