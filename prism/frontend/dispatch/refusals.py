"""Fails requests whose model cannot be placed or loaded, before the progress timeout does."""

from __future__ import annotations

import asyncio
import logging

from prism import clock
from prism.errors import QueueUnavailableError
from prism.frontend.dispatch.request_log import RequestLog
from prism.messages.cluster import ClusterStatus
from prism.queueing.request_queue import RequestQueue

CHECK_S = 1.0
# Redis does nothing else while it drops requests.
_REJECTED_AT_ONCE = 256

log = logging.getLogger(__name__)


class RefusalWatch:
    """Fails requests that have waited `after_s` for a model which the cluster scheduler has not
    been able to place for as long. For one event loop.

    The time restarts when the model becomes active. It continues while activations are tried and
    fail. For a model that engines cannot load, two checks in a row that find no device trying it
    are enough. Requests for a model that is refused for overload fail at the first check, unless
    they have output or an engine, which may drain, runs them.
    """

    def __init__(self, requests: RequestLog, queue: RequestQueue, after_s: float) -> None:
        self._requests = requests
        self._queue = queue
        self.after_s = after_s
        self._since_unix_s: dict[str, float] = {}
        self._broken: dict[str, str] = {}  # as of the last check
        # Models whose requests are rejected as they arrive, with the reason.
        self.overload: dict[str, str] = {}

    async def run(self) -> None:
        """Checks the published status until cancelled."""
        while True:
            await asyncio.sleep(min(CHECK_S, self.after_s / 4))
            if not len(self._requests) and not self.overload:
                continue
            try:
                status = await self._queue.status()
                if status is None:
                    self.overload = {}
                else:
                    self.take(status, clock.unix_s())
                    await self.reject()
            except QueueUnavailableError as error:
                log.debug("%s", error)

    def take(self, status: ClusterStatus, now_unix_s: float) -> None:
        active = {m.model for a in status.agents for m in a.models if m.state == "active"}
        for model in active:
            self._since_unix_s.pop(model, None)
        for model in status.refusals.keys() - active:
            self._since_unix_s.setdefault(model, now_unix_s)
        refused = status.refusals.keys() & set(status.overload) - active
        self.overload = {m: _cannot_be_placed(m, status.refusals[m]) for m in refused}
        before, self._broken = self._broken, _broken(status)
        for entry in self._requests.unended():
            request = entry.request
            reason = status.refusals.get(request.model)
            since_unix_s = self._since_unix_s.get(request.model, now_unix_s)
            waited_s = now_unix_s - max(since_unix_s, request.arrival_unix_s)
            # It waits, and is left to `reject`, or an engine runs it.
            is_new = request.model in self.overload and not entry.received
            if reason and entry.awaits_output and not is_new and waited_s >= self.after_s:
                entry.fail("model_unavailable", _cannot_be_placed(request.model, reason))
                continue
            # A new request makes the scheduler try again: its model may have been repaired.
            tried = now_unix_s - request.arrival_unix_s >= min(CHECK_S, self.after_s)
            problem = self._broken.get(request.model) if request.model in before else None
            if problem and entry.awaits_output and tried:
                entry.fail("model_unavailable", f"{request.model} cannot be loaded: {problem}")

    async def reject(self) -> None:
        """Fails the requests that wait in the queue for models which are refused for overload.
        Raises QueueUnavailableError."""
        open_ = [e for e in self._requests.unended() if e.request.model in self.overload]
        waiting = [entry.request.id for entry in open_ if not entry.received]
        for start in range(0, len(waiting), _REJECTED_AT_ONCE):
            for request_id in await self._queue.forget(waiting[start : start + _REJECTED_AT_ONCE]):
                if entry := self._requests.get(request_id):
                    entry.fail("model_unavailable", self.overload[entry.request.model])


def _cannot_be_placed(model: str, reason: str) -> str:
    return f"{model} cannot be placed now: {reason}"


def _broken(status: ClusterStatus) -> dict[str, str]:
    """Returns model -> why engines cannot load it, without models that a device serves or tries."""
    reports = [model for agent in status.agents for model in agent.models]
    others = {report.model for report in reports if not report.broken}
    return {report.model: report.error for report in reports if report.model not in others}
