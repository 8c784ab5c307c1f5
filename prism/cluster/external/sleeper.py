"""Loop that puts idle external servers to sleep, and wakes those that have requests.

A server is exclusive to requests or to its sleep, by `queueing/server_sleep.py`: frontends enter a
server before they send to it, and wait while it sleeps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

import httpx
import msgspec
from msgspec.structs import replace

from prism.cluster.external.sleep_apis import APIS, SleepingServer, find_api
from prism.cluster.state.scheduler_state import SchedulerState
from prism.config.schema.access import server_headers
from prism.errors import ConfigError, LeaseLostError, QueueUnavailableError
from prism.messages import MALFORMED_ERRORS
from prism.messages.external import ExternalModel, Sleep
from prism.queueing.request_queue import RequestQueue
from prism.queueing.server_sleep import SleepLook
from prism.tasks import cancel_all

_INTERVAL_S = 0.5
_ASLEEP_INTERVAL_S = 0.1  # while a server sleeps
# After a loss of Redis's data nothing falls asleep until every live frontend has sent a heartbeat,
# with its open requests.
_QUIET_S = 7.0
_CHECK_S = 5.0  # between looks at a sleeping server, which others may have woken or started again
_RETRY_S = 1.0  # after a failure
_REFUSED_S = 60.0  # after a server that does not sleep
_END_S = 4.0  # to wake servers at the end of the scheduler
NO_API = (
    "it has neither vLLM's sleep mode (VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode) nor SGLang's"
    " /server_info"
)

_UNREADABLE = (httpx.HTTPError, msgspec.DecodeError)

log = logging.getLogger("prism.cluster")


class Sleeper:
    """Loop over the servers of models with `sleep_after`. It alone puts them to sleep."""

    def __init__(self, state: SchedulerState, queue: RequestQueue) -> None:
        self._state = state
        self._queue = queue
        self._owner = uuid4().hex
        self._takes_over = True  # `look` was not called yet
        self._sleeps: dict[str, Sleep] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._doubtful: set[str] = set()  # URLs of servers that may be asleep, and must be woken
        self._no_sleep: dict[str, str] = {}
        self._busy_s: dict[str, float] = {}  # URL -> when it last had requests
        self._not_before_s: dict[str, float] = {}  # URL -> next change, after a failure
        self._checked_s: dict[str, float] = {}  # URL -> last look at a sleeping server
        self._quiet_until_s = 0.0

    def is_asleep(self, url: str) -> bool:
        return url in self._sleeps

    def problem(self, url: str) -> str:
        """Returns why a server cannot be woken."""
        return self._sleeps[url].problem if url in self._sleeps else ""

    def no_sleep(self, url: str) -> str:
        return self._no_sleep.get(url, "")

    async def run(self) -> None:
        """Puts servers to sleep and wakes them until cancelled; then all are woken."""
        try:
            while True:
                try:
                    await self._step()
                except QueueUnavailableError:
                    self._be_quiet()
                await asyncio.sleep(_ASLEEP_INTERVAL_S if self._sleeps else _INTERVAL_S)
        finally:
            await self._end()

    async def _step(self) -> None:
        wanted = _wanted(self._state.config.external)
        if not wanted and not self._sleeps and not self._takes_over:
            return
        urls = sorted({*wanted, *self._sleeps})
        look = await self._queue.sleep.look(self._owner, urls, takes_over=self._takes_over)
        if look is None:
            return
        if look.is_lost:
            self._be_quiet()
        self._finish_tasks()
        if self._takes_over:
            self._take_over(look, wanted)
            return
        await self._restore(look)
        now_s = time.monotonic()
        for url, count in look.entered.items():
            used_s = now_s if count else now_s - look.idle_s.get(url, now_s)
            self._busy_s[url] = max(used_s, self._busy_s.get(url, now_s))
        for url, sleep in self._sleeps.items():
            if url in self._tasks:
                continue
            wakes = url not in wanted or url in self._doubtful or look.entered.get(url)
            if wakes or sleep.phase != "asleep":
                if now_s >= self._not_before_s.get(url, 0.0):
                    self._spawn(url, self._wake(url))
            elif now_s >= self._checked_s.get(url, 0.0) + _CHECK_S:
                self._checked_s[url] = now_s
                self._spawn(url, self._check(url))
        for url in await self._idle(wanted, now_s):
            self._spawn(url, self._fall_asleep(url))

    def _be_quiet(self) -> None:
        self._quiet_until_s = time.monotonic() + _QUIET_S

    def _take_over(self, look: SleepLook, wanted: Mapping[str, float]) -> None:
        """Continues the sleep of servers that an earlier scheduler put to sleep."""
        for url, text in look.asleep.items():
            with suppress(*MALFORMED_ERRORS):
                sleep = msgspec.json.decode(text, type=Sleep)
                if sleep.api in APIS:
                    self._sleeps[url] = sleep
        self._takes_over = False
        for url in wanted:
            if url not in self._sleeps:
                self._spawn(url, self._adopt(url))

    async def _restore(self, look: SleepLook) -> None:
        """Writes what Redis lost. A server with a task is left to it, but for what is missing."""
        for url in {*look.asleep, *self._sleeps}:
            sleep = _text(self._sleeps.get(url))
            known = look.asleep.get(url, "")
            if sleep != known and (url not in self._tasks or (sleep and not known)):
                await self._queue.sleep.write(self._owner, url, sleep)

    async def _idle(self, wanted: Mapping[str, float], now_s: float) -> list[str]:
        """Returns the awake servers that have been idle for `sleep_after`.

        A request whose entry Redis lost is in its frontend's heartbeat. A frontend with another
        configuration may not enter the servers.
        """
        idle = [
            url
            for url, after_s in wanted.items()
            if url not in self._tasks
            and url not in self._sleeps
            and now_s >= self._not_before_s.get(url, 0.0)
            and now_s - self._busy_s[url] >= after_s
        ]
        if not idle or now_s < self._quiet_until_s:
            return []
        frontends = (await self._queue.frontends()).values()
        busy = {url for each in frontends for url in each.external}
        self._busy_s |= dict.fromkeys(busy, now_s)
        if any(each.revision != self._state.config.revision for each in frontends):
            return []
        return [url for url in idle if url not in busy]

    # --- tasks, at most one for each server -------------------------------------------------

    def _spawn(self, url: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[url] = asyncio.create_task(work)

    def _finish_tasks(self) -> None:
        for url in [url for url, task in self._tasks.items() if task.done()]:
            self._tasks.pop(url).result()

    async def _adopt(self, url: str) -> None:
        """Looks once whether a server sleeps that was not known to, as far as servers tell it."""
        async with self._server(url) as server:
            with suppress(*_UNREADABLE, QueueUnavailableError, LeaseLostError):
                found = await find_api(server)
                if found and not await found[0].is_awake(server, found[1], resumed=True):
                    await self._write(url, Sleep("asleep", found[0].name, found[1]))

    async def _fall_asleep(self, url: str) -> None:
        async with self._server(url) as server:
            try:
                found = await find_api(server)
            except httpx.HTTPError:
                return self._wait(url, _RETRY_S)
            if found is None:
                self._no_sleep[url] = NO_API
                return self._wait(url, _REFUSED_S)
            api, process = found
            sleep = Sleep("paused", api.name, process)
            with suppress(QueueUnavailableError):
                if await self._queue.sleep.claim(self._owner, url, _text(sleep)):
                    self._sleeps[url] = sleep
                    await self._release(server, sleep)

    async def _release(self, server: SleepingServer, sleep: Sleep) -> None:
        url, api = server.url, APIS[sleep.api]
        try:
            await api.pause(server)
            await self._write(url, replace(sleep, phase="asleep"))
            await api.release(server)
        except httpx.HTTPStatusError as error:
            self._no_sleep[url] = f"it refuses to sleep: {_said(error)}"
            if self._sleeps[url] == sleep and error.response.is_client_error:  # it lacks the API
                self._wait(url, _REFUSED_S)
                await self._set_awake(url)
            else:
                self._sleeps[url] = sleep
        except (httpx.ConnectError, QueueUnavailableError, LeaseLostError):
            self._sleeps[url] = sleep
        except httpx.TransportError as error:
            log.warning("%s may be asleep, and is woken: %s", url, _said(error))
            self._doubtful.add(url)
        else:
            log.info("%s sleeps", url)
            self._no_sleep.pop(url, None)
            self._checked_s[url] = time.monotonic()

    async def _wake(self, url: str) -> None:
        """Wakes a server, or ends a sleep that has not begun. `resume` is called once at most,
        unless the server refuses."""
        began_s = time.monotonic()
        async with self._server(url) as server:
            try:
                await self._resume(server, self._sleeps[url])
                await APIS[self._sleeps[url].api].unpause(server)
                await self._set_awake(url)
            except _UNREADABLE as error:
                self._sleeps[url] = replace(self._sleeps[url], problem=f"it sleeps: {_said(error)}")
                log.warning("%s cannot be woken: %s", url, _said(error))
                self._wait(url, _RETRY_S)
            except (QueueUnavailableError, LeaseLostError):
                self._wait(url, _RETRY_S)
            else:
                log.info("%s was woken in %.2f s", url, time.monotonic() - began_s)
                self._wait(url, _REFUSED_S if url in self._no_sleep else 0.0)

    async def _resume(self, server: SleepingServer, sleep: Sleep) -> None:
        url, api, resumed = server.url, APIS[sleep.api], sleep.phase == "waking"
        is_released = sleep.phase != "paused"
        if is_released and not await api.is_awake(server, sleep.process, resumed=resumed):
            await self._write(url, replace(sleep, phase="waking"))
            try:
                await api.resume(server)
            except (httpx.HTTPStatusError, httpx.ConnectError):
                self._sleeps[url] = sleep
                raise
        self._sleeps[url] = replace(sleep, phase="paused")

    async def _check(self, url: str) -> None:
        """Notices that a sleeping server was woken or started again by others."""
        sleep = self._sleeps[url]
        async with self._server(url) as server:
            with suppress(*_UNREADABLE, QueueUnavailableError):
                if await APIS[sleep.api].is_awake(server, sleep.process, resumed=False):
                    await self._set_awake(url)

    async def _set_awake(self, url: str) -> None:
        self._sleeps.pop(url)
        self._doubtful.discard(url)
        self._busy_s[url] = time.monotonic()
        with suppress(QueueUnavailableError):  # `_restore` does it then
            await self._queue.sleep.write(self._owner, url, "")

    async def _write(self, url: str, sleep: Sleep) -> None:
        """Raises LeaseLostError if another scheduler took over."""
        if not await self._queue.sleep.write(self._owner, url, _text(sleep)):
            raise LeaseLostError("another scheduler puts servers to sleep")
        self._sleeps[url] = sleep

    def _wait(self, url: str, pause_s: float) -> None:
        self._not_before_s[url] = time.monotonic() + pause_s

    @asynccontextmanager
    async def _server(self, url: str) -> AsyncIterator[SleepingServer]:
        timeout_s = float(self._state.config.engine.activation_timeout_s)
        server = SleepingServer(url, _headers(self._state.config.external, url), timeout_s)
        try:
            yield server
        finally:
            await server.close()

    async def _end(self) -> None:
        """Wakes all servers. What the next scheduler must know is in Redis."""
        await cancel_all(self._tasks.values())
        waking = [asyncio.create_task(self._wake(url)) for url in self._sleeps]
        if waking:
            await asyncio.wait(waking, timeout=_END_S)
            await cancel_all(waking)
        for url, sleep in list(self._sleeps.items()):
            if sleep.phase == "waking":  # the server does it after the call that it has
                async with self._server(url) as server:
                    with suppress(*_UNREADABLE, TimeoutError):
                        await asyncio.wait_for(APIS[sleep.api].unpause(server), 1)


def _wanted(models: Sequence[ExternalModel]) -> dict[str, float]:
    """Returns URL -> `sleep_after`."""
    return {u: m.sleep_after_s for m in models for u in m.servers if m.sleep_after_s}


def _headers(models: Sequence[ExternalModel], url: str) -> dict[str, str]:
    """Returns the header with a server's key. Empty: there is none, or the arbiter shows why."""
    model = next((m for m in models if url in m.servers), None)
    with suppress(ConfigError):
        return server_headers(model.key_variable) if model else {}
    return {}


def _text(sleep: Sleep | None) -> str:
    return msgspec.json.encode(sleep).decode() if sleep else ""


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
