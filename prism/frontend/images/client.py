"""Client of the process that prepares images."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from contextlib import suppress

import msgspec

from prism.frontend.child_process import exchange
from prism.frontend.http.error_bodies import OverloadedError, UnavailableError
from prism.frontend.http.fair_lock import FairLock, client_name
from prism.frontend.images.image_process import HEADER, Answer, Ask
from prism.frontend.images.preparation import PreparedImage
from prism.messages.model_spec import ModelSpec
from prism.process import child_environment
from prism.tasks import cancel_all

WAITING_MAX = 64  # images that wait or are being prepared
WAITING_OF_A_CLIENT_MAX = 8
_START_S_MAX = 120.0


class ImageClient:
    """Starts the process for the first image, and again after an image has ended it. For one event
    loop."""

    def __init__(self) -> None:
        self._lock = FairLock()
        self._process: asyncio.subprocess.Process | None = None
        self._running: asyncio.Task[PreparedImage] | None = None
        self._clients: Counter[str] = Counter()  # client -> its waiting and running images

    async def prepare(
        self, model: ModelSpec, data: bytes, pixels_max: int, timeout_s: float
    ) -> PreparedImage:
        """Returns the image in the file `data` for `model`. Raises ValueError with what is wrong
        with it, OverloadedError if too many are waiting, and UnavailableError if the process cannot
        be started."""
        client = client_name()
        full = self._clients.total() >= WAITING_MAX
        if full or self._clients[client] >= WAITING_OF_A_CLIENT_MAX:
            raise OverloadedError("too many images are waiting to be prepared; try again later")
        self._clients[client] += 1
        try:
            await self._lock.acquire(client)
        except BaseException:
            self._forget(client)
            raise
        asked = Ask(model.path, model.dtype, data, pixels_max)
        self._running = asyncio.create_task(self._in_turn(client, model, asked, timeout_s))
        # Not cancelled with its client: the next image would have to wait for a new process.
        return await asyncio.shield(self._running)

    async def close(self) -> None:
        if self._running is not None:
            await cancel_all([self._running])
        await self._end()

    def _forget(self, client: str) -> None:
        self._clients[client] -= 1
        self._clients += Counter()  # drops what is zero

    async def _in_turn(
        self, client: str, model: ModelSpec, asked: Ask, timeout_s: float
    ) -> PreparedImage:
        began_s = asyncio.get_running_loop().time()
        try:
            await self._start(model)
            return await self._prepared(asked, timeout_s)
        finally:
            self._forget(client)
            self._lock.release(client, asyncio.get_running_loop().time() - began_s)

    async def _prepared(self, asked: Ask, timeout_s: float) -> PreparedImage:
        try:
            answer = await self._ask(asked, timeout_s)
        except TimeoutError as error:
            await self._end()
            raise ValueError(
                f"takes longer than {timeout_s:g} s to prepare (frontend.images.timeout)"
            ) from error
        except EOFError as error:
            await self._end()
            raise ValueError("ends the process that prepares it") from error
        except BaseException:
            await self._end()  # a late answer would be read as the next one's
            raise
        if answer.image is None:
            raise ValueError(answer.error)
        return answer.image

    async def _start(self, model: ModelSpec) -> None:
        """Starts the process if none runs, and loads the model's processor in it. The imports then
        do not count against an image."""
        try:
            if self._process is None or self._process.returncode is not None:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "prism.frontend.images.image_process",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    env=child_environment() | {"OMP_NUM_THREADS": "1"},
                )  # fmt: skip
            loaded = await self._ask(Ask(model.path, model.dtype), _START_S_MAX)
        except (OSError, EOFError) as error:  # a timeout is an OSError
            await self._end()
            raise UnavailableError("images cannot be prepared now; try again later") from error
        except BaseException:
            await self._end()
            raise
        if loaded.error:
            text = f"images of {model.name} cannot be prepared: {loaded.error:.300}"
            raise UnavailableError(text)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ask(self, asked: Ask, limit_s: float) -> Answer:
        """Returns the answer. Raises TimeoutError, or EOFError if the process died."""
        assert self._process is not None
        packed = msgspec.msgpack.encode(asked)
        question = HEADER.pack(len(packed)) + packed
        body = await exchange(self._process, question, _message, limit_s)
        return msgspec.msgpack.decode(body, type=Answer)


async def _message(answers: asyncio.StreamReader) -> bytes:
    header = await answers.readexactly(HEADER.size)
    return await answers.readexactly(HEADER.unpack(header)[0])
