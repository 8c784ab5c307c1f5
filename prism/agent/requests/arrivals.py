"""Arrivals of requests from the device's queue, and cancellations by their frontends."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping

from prism.agent.network.sockets import OutputBatch, TokenSender, retryable, silent_frontend
from prism.agent.requests.running import RunningRequests
from prism.agent.state.request_table import RequestState, RequestTable, TrackedRequest, Update
from prism.messages.requests import Chunk, Failure, Request

log = logging.getLogger(__name__)

GONE_MAX = 256  # ended frontends to remember


class Arrivals:
    """Arrivals and cancellations of requests."""

    def __init__(
        self, requests: RequestTable, running: RunningRequests, tokens: TokenSender
    ) -> None:
        self._requests = requests
        self._running = running
        self._tokens = tokens
        self._gone: deque[str] = deque(maxlen=GONE_MAX)

    def arrived(self, entry_id: str, request: Request) -> None:
        """Handles an entry of the queue, perhaps not for the first time."""
        known = self._requests.get(request.id)
        entry = TrackedRequest(request, entry_id)
        if request.frontend_id in self._gone:
            self._requests.outbox.add(Update.FORGET, request.id, request)
        elif self._requests.has_ended(request):
            self._fail_ended(entry)
        elif known is None or known.state is RequestState.WAITING:
            self._requests.wait(entry)
        elif known.state is RequestState.ADMITTING:
            if known.entry_id != entry_id:
                known.newer = entry
        elif request.attempt > known.request.attempt:
            known.newer = entry
            self._running.stop(known)
        else:
            self._requests.outbox.add(Update.REGISTER, request.id, known.request)
        self._requests.wake()

    def _fail_ended(self, entry: TrackedRequest) -> None:
        """Fails an attempt that ended here before.

        Redis lost its data, and the frontend sent the request again because it had not seen the
        end. The end was sent before this failure: if the frontend gets this first, the end is lost.
        """
        self._requests.outbox.add(Update.DISCARD, entry.entry_id)
        text = "the request ended, and its output did not arrive"
        batch = OutputBatch()
        batch.failure(entry.request, retryable(entry.request, "output_lost", text))
        self._tokens.send(batch)

    def malformed(self, entries: Mapping[str, tuple[str, int]], frontends: Collection[str]) -> None:
        """Fails the requests of malformed entries that were set aside.

        The frontend that sent one of them still has the request and may send it again.

        Args:
            entries: entry id -> (request id, attempt).
            frontends: the live frontends, one of which sent them.
        """
        self._requests.malformed_total += len(entries)
        batch = OutputBatch()
        for request_id, attempt in entries.values():
            log.error("the queue's entry of request %.100r is malformed", request_id)
            text = "the queue's copy of the request is malformed"
            failure = Failure(request_id, attempt, "malformed_request", text, retryable=True)
            for frontend_id in frontends:
                batch.output(frontend_id).failures.append(failure)
        self._tokens.send(batch)

    def replayed(self, entry_ids: Collection[str]) -> None:
        """Drops waiting requests whose entries are not among those that wait in the queue."""
        for tracked in self._requests.waiting():
            if tracked.entry_id not in entry_ids:
                self._requests.drop(tracked)

    # --- cancellations ----------------------------------------------------------------------

    def cancel(self, request_ids: Collection[str]) -> None:
        """Cancels requests for their frontend.

        Unknown ids are ignored, because a cancellation is sent to all agents.
        """
        batch = OutputBatch()
        for request_id in request_ids:
            if (tracked := self._requests.get(request_id)) is None:
                continue
            if not tracked.is_on_engine:
                attempt = tracked.request.attempt
                batch.chunk(tracked.request, Chunk(request_id, attempt, 0, [], "cancelled"))
            self._cancel(tracked)
        self._tokens.send(batch)
        self._requests.wake()

    def _cancel(self, tracked: TrackedRequest) -> None:
        if tracked.newer is not None:
            self._requests.outbox.add(Update.FORGET, tracked.id, tracked.newer.request)
            tracked.newer = None
        if tracked.is_running:
            self._running.cancel(tracked)
        elif tracked.state is RequestState.ADMITTING:
            tracked.cancelled = True
        else:
            self._forget(tracked)

    def frontend_gone(self, frontend_id: str) -> None:
        """Cancels all requests of a frontend that ended, including those not read yet."""
        self._gone.append(frontend_id)
        for tracked in self._requests.of_frontend(frontend_id):
            self._cancel(tracked)
            if tracked.is_on_engine:
                tracked.state = RequestState.ENDING
        self._requests.wake()

    def frontend_died(self, frontend_id: str) -> None:
        """Stops and drops all requests of a silent frontend.

        A failure is sent for each: a frontend that was only suspended would wait for their output.
        """
        batch = OutputBatch()
        for run in self._requests.on_engines():
            if run.request.frontend_id == frontend_id and run.state is not RequestState.ENDING:
                self._running.stop(run)
                batch.failure(run.request, silent_frontend(run.request))
        for tracked in self._requests.waiting():
            if tracked.request.frontend_id == frontend_id:
                self._forget(tracked)
                batch.failure(tracked.request, silent_frontend(tracked.request))
        self._tokens.send(batch)
        self._requests.wake()

    def _forget(self, waiting: TrackedRequest) -> None:
        self._requests.drop(waiting)
        self._requests.outbox.add(Update.FORGET, waiting.id, waiting.request)
