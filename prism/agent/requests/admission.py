"""Admission of waiting requests to engines, and the loop that steps it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

from prism.agent.engines.reclaimer import Reclaimer
from prism.agent.requests.controlled_steps import ControlledSteps
from prism.agent.requests.engine_views import EngineViews
from prism.agent.requests.queue import Lease
from prism.agent.requests.running import RunningRequests
from prism.agent.state.device_state import DeviceState
from prism.agent.state.request_table import TrackedRequest, Update
from prism.errors import LeaseLostError, QueueUnavailableError
from prism.messages.image_tensors import Tensors, size_bytes
from prism.queueing import RequestQueue
from prism.transport import SUBMITTED_IMAGE_BYTES_MAX

log = logging.getLogger(__name__)

# Pause between two steps. Requests that arrive during it are ordered together.
PAUSE_S = 0.002
# Time to the next step without a wake-up, for expired deadlines and memory that became free.
WAITING_S = 0.05
IDLE_S = 1.0  # the same while no request waits


class Admission:
    """Admission of requests. Only `step` changes requests in Redis.

    So acknowledgements and admissions cannot overtake each other.

    Args:
        device: the device's name.
        steps: chooses the requests in place of the local scheduler, if the policy controls steps.
    """

    def __init__(
        self,
        state: DeviceState,
        *,
        views: EngineViews,
        reclaimer: Reclaimer,
        queue: RequestQueue,
        device: str,
        running: RunningRequests,
        steps: ControlledSteps | None = None,
    ) -> None:
        self._steps = steps
        self._requests = state.requests
        self._now_s = state.now_s
        self._views = views
        self._reclaimer = reclaimer
        self._queue = queue
        self._device = device
        self._running = running
        self.paused = False

    async def step(self, epoch: int) -> None:
        """Sends queue updates to Redis, then admits and submits the requests that start now.

        Raises QueueUnavailableError or LeaseLostError; the next step then does the rest.
        """
        if self._steps is not None:
            await self._control(self._steps, epoch)
            return
        await self._requests.outbox.flush(self._queue, self._device, epoch)
        if self.paused or not self._requests.has_waiting:
            return
        plan, admitting = self._requests.plan(self._now_s(), self._views.read())
        for model, tokens in plan.lacking.items():
            self._reclaimer.reclaim_tokens(tokens, model)
        for model in plan.preempt:
            self._running.preempt(model)
        if admitting:
            await self._admit(admitting, epoch)

    async def _control(self, steps: ControlledSteps, epoch: int) -> None:
        """Does `step` under step control. Running requests continue while Redis is away."""
        try:
            await self._requests.outbox.flush(self._queue, self._device, epoch)
            if self.paused:
                self._only_running(steps)
            elif admitting := steps.step():
                await self._admit(admitting, epoch)
        except (QueueUnavailableError, LeaseLostError):
            self._only_running(steps)
            raise
        finally:
            steps.admitted()

    def _only_running(self, steps: ControlledSteps) -> None:
        for tracked in steps.hold_back():
            self._wait_again(tracked)

    async def _admit(self, admitting: list[TrackedRequest], epoch: int) -> None:
        left = admitting
        try:
            admitted = await self._queue.admit(self._device, epoch, [t.entry_id for t in admitting])
            left = self._admitted(admitting, admitted)
            async for part, images in self._parts(left):
                left = left[len(part) :]
                self._running.submit(part[0].request.model, part, images)
        except (QueueUnavailableError, LeaseLostError):
            for tracked in left:
                self._put_back(tracked)
            raise

    def _admitted(
        self, admitting: Sequence[TrackedRequest], admitted: set[str]
    ) -> list[TrackedRequest]:
        """Returns the requests whose entries are `admitted`, those of a model in a row, and drops
        the others."""
        by_model: dict[str, list[TrackedRequest]] = {}
        for tracked in admitting:
            if tracked.entry_id in admitted:
                by_model.setdefault(tracked.request.model, []).append(tracked)
                continue
            if tracked.cancelled:  # its entry is stale; the request may wait in another one
                self._requests.outbox.add(Update.FORGET, tracked.id, tracked.request)
            self._requests.drop(tracked)
        return [tracked for chosen in by_model.values() for tracked in chosen]

    async def _parts(
        self, admitted: Sequence[TrackedRequest]
    ) -> AsyncIterator[tuple[list[TrackedRequest], dict[str, Tensors]]]:
        """Yields the requests in order, in parts for one message each, with their images: of one
        model, and with at most SUBMITTED_IMAGE_BYTES_MAX of images unless one request has more."""
        part: list[TrackedRequest] = []
        images: dict[str, Tensors] = {}
        for tracked in admitted:
            own = await self._images(tracked, images)
            joined = images | own
            grows = len(joined) > len(images)
            is_full = grows and size_bytes(joined.values()) > SUBMITTED_IMAGE_BYTES_MAX
            if part and (is_full or part[0].request.model != tracked.request.model):
                yield part, images
                part, joined = [], own
            part.append(tracked)
            images = joined
        if part:
            yield part, images

    async def _images(
        self, tracked: TrackedRequest, known: dict[str, Tensors]
    ) -> dict[str, Tensors]:
        """Returns the request's images by digest: those of `known`, and others that Redis has."""
        digests = {image.digest for image in tracked.request.images}
        lacking = digests - known.keys()
        read = await self._queue.images(lacking) if lacking else {}
        return {digest: known[digest] for digest in digests & known.keys()} | read

    def _put_back(self, tracked: TrackedRequest) -> None:
        """Lets a request wait again after a failed admission.

        Redis may have admitted it nevertheless. So it is requeued, since a full read or a
        cancellation would not find it otherwise.
        """
        self._requests.outbox.add(Update.REQUEUE, tracked.id)
        self._wait_again(tracked)

    def _wait_again(self, tracked: TrackedRequest) -> None:
        """Lets a request wait again that was not admitted."""
        if tracked.cancelled:
            self._requests.outbox.add(Update.FORGET, tracked.id, tracked.request)
        if tracked.cancelled or tracked.newer is not None:
            self._requests.drop(tracked)
        else:
            self._requests.wait(tracked)


class AdmissionLoop:
    """Loop that runs an admission step when it is woken, and checks the request table when idle."""

    def __init__(self, lease: Lease, admission: Admission, state: DeviceState) -> None:
        self._lease = lease
        self._admission = admission
        self._state = state
        self._requests = state.requests
        self._known_problems: set[str] = set()
        self._down = False

    async def run(self) -> None:
        """Runs until cancelled. Raises LeaseLostError if another agent has the queue."""
        while True:
            if self._requests.has_waiting:
                await self._woken_within(WAITING_S)
            elif not await self._woken_within(IDLE_S):
                self._check()
            self._requests.woken.clear()
            await self._step()
            await asyncio.sleep(PAUSE_S)

    async def _step(self) -> None:
        epoch = self._lease.epoch
        try:
            async with self._lease.lock:
                epoch = self._lease.epoch
                await self._admission.step(epoch)
            self._down = False
        except QueueUnavailableError as error:
            log.log(logging.DEBUG if self._down else logging.WARNING, "%s", error)
            self._down = True
            await asyncio.sleep(self._state.timing.retry_s)
            self._requests.wake()
        except LeaseLostError:
            await self._lease.retake(epoch)
            self._requests.wake()

    async def _woken_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._requests.woken.wait()
        except TimeoutError:
            return False

    def _check(self) -> None:
        """Logs each inconsistency of the request table, which is a bug, once."""
        engine_ids = {engine.id for engine in self._state.pool}
        problems = set(self._requests.check_integrity(engine_ids))
        for problem in problems - self._known_problems:
            log.error("the table of requests is inconsistent: %s", problem)
        self._known_problems = problems
