"""Heartbeat of a frontend in Redis."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from prism.errors import QueueUnavailableError
from prism.frontend.dispatch.request_log import RequestLog
from prism.frontend.live_config import LiveConfig
from prism.messages.cluster import FrontendState
from prism.messages.external import ServerLoad
from prism.queueing.request_queue import RequestQueue

log = logging.getLogger(__name__)

_TTL_S = 6.0
_PERIOD_S = 2.0
# A small part of a slot of `prism/scheduler/traffic.py`.
_ARRIVALS_S = 0.5


class Heartbeat:
    """Heartbeat of a frontend, with the revision of its configuration, the removed models that
    still have open requests, and the number of arrivals. For one event loop.

    `restore` enqueues the open requests again, since Redis may have lost its data. It may raise
    QueueUnavailableError, and is then called again.
    """

    def __init__(
        self,
        live: LiveConfig,
        frontend_id: str,
        queue: RequestQueue,
        requests: RequestLog,
        restore: Callable[[], Awaitable[None]],
        *,
        external_loads: Callable[[], dict[str, ServerLoad]],
    ) -> None:
        self._live = live
        self._id = frontend_id
        self._queue = queue
        self._requests = requests
        self._restore = restore
        self._external_loads = external_loads
        self._sent_loads: dict[str, ServerLoad] = {}
        self._sending = asyncio.Lock()  # the last heartbeat must be the newest
        self._reported: dict[str, int] = {}  # model -> arrivals in the last heartbeat

    async def run(self) -> None:
        """Sends heartbeats until cancelled. Open requests are restored at the second heartbeat that
        Redis answers after an outage, or with another incarnation of its data. By then the agents
        have registered their running requests."""
        restored: str | None = None
        seen: str | None = ""
        while True:
            began_s = time.monotonic()
            try:
                incarnation = await self._send()
                await self._keep_images()
                if incarnation == seen != restored:
                    await self._restore()
                    restored = incarnation
                seen = incarnation
            except QueueUnavailableError as error:
                log.log(logging.DEBUG if seen is None else logging.WARNING, "%s", error)
                restored = seen = None
            await asyncio.sleep(max(0.1, _PERIOD_S - (time.monotonic() - began_s)))

    async def announce(self) -> None:
        """Announces a new configuration at once, before the next heartbeat does."""
        try:
            await self._send()
        except QueueUnavailableError as error:
            log.warning("%s", error)

    async def report_arrivals(self) -> None:
        """Sends more heartbeats while requests arrive, until cancelled. Policies see rates, which a
        heartbeat that is due just after a slot's end would falsify."""
        while True:
            await asyncio.sleep(_ARRIVALS_S)
            loads_differ = self._sent_loads != self._external_loads()
            if loads_differ or self._reported != self._arrivals():
                with suppress(QueueUnavailableError):
                    await self._send()

    def _arrivals(self) -> dict[str, int]:
        return {model: sum(counts.values()) for model, counts in self._requests.arrivals.items()}

    async def _send(self) -> str:
        """Sends a heartbeat. Returns the incarnation of Redis's data."""
        async with self._sending:
            config, reported = self._live.config, self._arrivals()
            leaving = sorted(self._requests.models() - {model.name for model in config.models})
            loads = self._external_loads()
            state = FrontendState(config.revision, leaving, self._requests.arrivals, loads)
            incarnation = await self._queue.beat(self._id, _TTL_S, state)
            self._reported, self._sent_loads = reported, loads
        return incarnation

    async def _keep_images(self) -> None:
        """Keeps the images of open requests in Redis."""
        shown = (image for each in self._requests.unended() for image in each.request.images)
        await self._queue.keep_images({image.digest for image in shown})
