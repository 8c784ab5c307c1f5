"""Lease of the device's queue, its reader, and watches of waiting requests."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from uuid import uuid4

from prism.agent.state.device_state import AgentTiming, DeviceState, ModelState
from prism.agent.state.request_table import Update
from prism.errors import LeaseLostError, MalformedRequestError, QueueUnavailableError
from prism.messages.requests import Request
from prism.queueing import RequestQueue

log = logging.getLogger(__name__)


BLOCK_S = 1.0  # time that a read of the queue waits for the next request


class Lease:
    """Lease of the device's queue.

    Args:
        held: returns the ids of the requests that this agent runs.
        retakes: whether to retake the queue also after another agent held it, which has requeued
            the requests that run here.
        on_retaken: called after the queue was retaken. It may have changed, and Redis may have lost
            its data, so the agent must read it again and register its requests.
    """

    def __init__(
        self,
        *,
        queue: RequestQueue,
        device: str,
        timing: AgentTiming,
        held: Callable[[], Collection[str]],
        retakes: bool,
        on_retaken: Callable[[], None],
    ) -> None:
        self.epoch = 0
        """Fencing token for the queue's calls. Changes when the lease is retaken."""
        # Held during admission: a request admitted while the queue is retaken would be missing in
        # `held` and would be requeued.
        self.lock = asyncio.Lock()
        self.owner = f"{os.getpid()}-{uuid4().hex}"
        """Name of this process."""
        self._retakes = retakes
        self._queue = queue
        self._device = device
        self._timing = timing
        self._held = held
        self._on_retaken = on_retaken

    async def acquire(self) -> None:
        """Acquires the lease. Waits up to `lease_wait_s` for Redis and for an earlier lease's end.

        Raises LeaseLostError or QueueUnavailableError after that.
        """
        deadline_s = time.monotonic() + self._timing.lease_wait_s
        while True:
            try:
                await self._take()
            except (LeaseLostError, QueueUnavailableError) as error:
                if time.monotonic() >= deadline_s:
                    raise
                log.warning("%s", error)
                await asyncio.sleep(self._timing.retry_s)
            else:
                return

    async def run(self) -> None:
        """Renews the lease periodically. Raises LeaseLostError if another agent has the queue."""
        while True:
            await asyncio.sleep(self._timing.lease_ttl_s / 3)
            epoch = self.epoch
            try:
                await self._queue.renew(self._device, self.owner, epoch, self._timing.lease_ttl_s)
            except LeaseLostError:
                await self.retake(epoch)
            except QueueUnavailableError as error:
                log.warning("the lease is not renewed: %s", error)

    async def retake(self, lost_epoch: int) -> None:
        """Acquires the lease again after Redis rejected `lost_epoch`.

        Redis lost its data, or another agent has or had the queue. Does nothing if the lease was
        retaken already. Raises LeaseLostError if another agent has the queue, or, unless `retakes`,
        had it.
        """
        async with self.lock:
            if self.epoch != lost_epoch:
                return
            log.warning("acquiring the queue of %s again", self._device)
            try:
                await self._take(0 if self._retakes else lost_epoch)
            except QueueUnavailableError as error:
                log.warning("%s", error)
                return
            self._on_retaken()

    async def release(self) -> None:
        try:
            await self._queue.release(self._device, self.owner, self.epoch)
        except QueueUnavailableError as error:
            log.warning("the lease is not released and will expire: %s", error)

    async def _take(self, since_epoch: int = 0) -> None:
        self.epoch = await self._queue.acquire(
            self._device, self.owner, self._timing.lease_ttl_s, self._held(), since_epoch
        )


class QueueReader:
    """Queue reader of one device.

    Args:
        on_entry: called with each waiting request, perhaps not for the first time.
        on_replayed: called after a full read with the ids of all waiting entries.
        set_aside: removes malformed entries, entry id -> (request id, attempt), from the queue.
    """

    def __init__(
        self,
        queue: RequestQueue,
        device: str,
        timing: AgentTiming,
        *,
        on_entry: Callable[[str, Request], None],
        on_replayed: Callable[[Collection[str]], None],
        set_aside: Callable[[Mapping[str, tuple[str, int]]], Awaitable[None]],
    ) -> None:
        self._queue = queue
        self._device = device
        self._timing = timing
        self._on_entry = on_entry
        self._on_replayed = on_replayed
        self._set_aside = set_aside
        self._replay = True
        self._cursor = self._left = "0"

    def replay(self) -> None:
        """Makes the next read a full one, because the queue may have changed unnoticed."""
        self._replay = True

    async def run(self) -> None:
        down = False
        while True:
            try:
                if self._replay:
                    await self._read_all()
                await self._follow()
                down = False
            except MalformedRequestError as error:
                await self._take_out(error.entries)
            except QueueUnavailableError as error:
                log.log(logging.DEBUG if down else logging.WARNING, "%s", error)
                down = self._replay = True
                await asyncio.sleep(self._timing.retry_s)

    async def _take_out(self, malformed: Mapping[str, tuple[str, int]]) -> None:
        """Sets malformed entries aside, and reads again: a full read may have been in progress."""
        self._replay = True
        try:
            await self._set_aside(malformed)
        except (QueueUnavailableError, LeaseLostError) as error:
            log.warning("malformed entries stay in the queue: %s", error)
            await asyncio.sleep(self._timing.retry_s)

    async def _read_all(self) -> None:
        self._replay, self._cursor = False, "0"
        seen: set[str] = set()
        while entries := await self._queue.read(self._device, self._cursor):
            self._take(entries)
            seen.update(entry_id for entry_id, _ in entries)
        self._on_replayed(seen)

    async def _follow(self) -> None:
        entries, left = await self._queue.follow(self._device, self._cursor, self._left, BLOCK_S)
        self._take(entries)
        self._replay, self._left = self._replay or left != self._left, left
        if entries:
            await asyncio.sleep(0)  # lets their admission start before the next read is sent

    def _take(self, entries: Sequence[tuple[str, Request]]) -> None:
        for entry_id, request in entries:
            self._cursor = entry_id
            self._on_entry(entry_id, request)


class FrontendWatch:
    """Watch of frontends' heartbeats.

    Args:
        known: returns the ids of frontends with requests or sockets here.
        on_dead: called once for each frontend without a heartbeat.
    """

    def __init__(
        self,
        state: DeviceState,
        queue: RequestQueue,
        known: Callable[[], set[str]],
        on_dead: Callable[[str], None],
    ) -> None:
        self._timing = state.timing
        self._now_s = state.now_s
        self._queue = queue
        self._known = known
        self._on_dead = on_dead
        self._missing_since_s: dict[str, float] = {}

    def reset(self) -> None:
        """Restarts the time limits of missing heartbeats, for example after a loss of data."""
        self._missing_since_s.clear()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._timing.frontend_check_s)
            try:
                await self._check()
            except QueueUnavailableError:
                self.reset()  # heartbeats cannot arrive either

    async def _check(self) -> None:
        known = sorted(self._known())
        alive = await self._queue.live_frontends(known)
        now_s = self._now_s()
        missing = {name: self._missing_since_s.get(name, now_s) for name in known}
        self._missing_since_s = {n: since for n, since in missing.items() if n not in alive}
        for name, since_s in list(self._missing_since_s.items()):
            if now_s - since_s >= self._timing.frontend_missing_s:
                log.warning(
                    "frontend %s does not have a heartbeat: its requests are cancelled", name
                )
                del self._missing_since_s[name]
                self._on_dead(name)


class OrphanedRequests:
    """Unplaces waiting requests of models that are not here, so that they are placed again.

    Requests are often routed here before the order to activate arrives, so they wait for a grace
    period.
    """

    def __init__(self, state: DeviceState) -> None:
        self._requests = state.requests
        self._models = state.models
        self._timing = state.timing
        self._now_s = state.now_s
        self._since_s: dict[str, float] = {}

    def tick(self) -> None:
        if given_up := self.given_up(self._requests.waiting_counts()):
            self.unplace(given_up)

    def unplace(self, models: Collection[str]) -> None:
        """Moves waiting requests of these models to the unplaced queue."""
        for tracked in self._requests.waiting():
            if tracked.request.model in models:
                self._requests.outbox.add(Update.UNPLACE, tracked.entry_id)
                self._requests.drop(tracked)
                self._requests.wake()

    def given_up(self, waiting_models: Collection[str]) -> set[str]:
        """Returns those of `waiting_models` whose requests should not wait here any longer."""
        now_s = self._now_s()
        absent = {model for model in waiting_models if not self._is_here(model)}
        self._since_s = {model: self._since_s.get(model, now_s) for model in absent}
        return {m for m, since_s in self._since_s.items() if now_s - since_s >= self._grace_s(m)}

    def _is_here(self, model: str) -> bool:
        hosted = self._models.hosted.get(model)
        return hosted is not None and hosted.takes_requests

    def _grace_s(self, model: str) -> float:
        hosted = self._models.hosted.get(model)
        if hosted is None:
            return self._timing.absent_grace_s
        return 0.0 if hosted.state is ModelState.DRAINING else self._timing.failed_grace_s
