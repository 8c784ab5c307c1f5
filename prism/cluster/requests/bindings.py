"""Virtual queues of the live cluster (`prism/scheduler/virtual_queues.py`).

Requests wait in the unplaced queue until they start, so they survive the loss of this process, an
agent or an engine. Queues are assigned anew after a restart.
"""

from __future__ import annotations

import asyncio
import math

from prism.cluster.requests.estimates import Estimates
from prism.cluster.state.agents import ABSENT_STATES
from prism.cluster.state.scheduler_state import SchedulerState
from prism.policies.placement import Problem, Unit
from prism.policies.queues import Assign, QueueDevice, QueueView
from prism.queueing.request_queue import RequestQueue
from prism.scheduler.virtual_queues import VirtualQueues, tokens_per_s


class Bindings:
    """Assigns waiting requests to devices, and moves those that start to the devices' queues.

    REQUIRES: a placement was searched, except for `read`.
    """

    def __init__(self, state: SchedulerState, queue: RequestQueue, assign: Assign) -> None:
        self._state = state
        self._queue = queue
        self._queues = VirtualQueues(assign)
        self._estimates = Estimates(state)
        self._tokens_per_s: dict[str, float] = {}
        self._swap_s: dict[str, float] = {}
        # `WaitingRequests.cursor` of the last assignment.
        self._assigned = ""

    async def read(self) -> dict[str, int]:
        """Reads the waiting requests. Returns model -> their number. Raises
        QueueUnavailableError."""
        return await self._state.read_waiting(self._queue)

    async def step(self) -> None:
        """Assigns if it is due, and moves the requests that start. Raises QueueUnavailableError."""
        state = self._state
        if state.now_s() >= self._queues.due_s:
            await self._assign()
        for device, group in self._queues.starting(self._is_active):
            await state.waiting.bind(self._queue, device, group.requests)
        for unit in self._instances()[:1]:
            await state.waiting.bind_malformed(self._queue, unit.devices[0])

    @property
    def due_in_s(self) -> float:
        """Seconds until the next step is due because of new requests; infinity without any, and
        while none is assigned."""
        state = self._state
        is_ready = state.target is not None and state.book.all_heard(state.now_s())
        if not is_ready or self._assigned == state.waiting.cursor:
            return math.inf
        return max(0.0, self._queues.due_s - state.now_s())

    async def _assign(self) -> None:
        """Assigns in a thread, since it takes up to a second if thousands of requests wait."""
        state = self._state
        await state.waiting.prune(self._queue)
        now_s, self._assigned = state.now_s(), state.waiting.cursor
        self._estimate(now_s)
        view = QueueView(
            now_s,
            state.waiting.of(self._tokens_per_s.keys()),
            tuple(self._device(unit) for unit in self._instances()),
            self._queues.queues,
            self._tokens_per_s,
            self._swap_s,
        )
        await asyncio.to_thread(self._queues.update, view)
        state.queues = self._queues.queues

    # --- input of an assignment -------------------------------------------------------------

    def _instances(self) -> tuple[Unit, ...]:
        return self._state.target.units if self._state.target is not None else ()

    def _device(self, unit: Unit) -> QueueDevice:
        name, state = unit.devices[0], self._state
        barred = state.activations.barred
        # A model that cannot be loaded there must not stop those after it in the queue.
        able = (h.model for h in unit.models if name not in barred(h.model, state.now_s()))
        here, running = self._resident(name), state.waiting.open.get(name, 0)
        return QueueDevice(name, here, running, frozenset(able))

    def _resident(self, device: str) -> str | None:
        """Returns the model that is active on the device or will be, or None."""
        moves = self._state.actions.moves.values()
        coming = [m.model for m in moves if m.brings_up and m.device == device]
        leaving = {m.model for m in moves if not m.brings_up and device in m.devices}
        report = self._state.book.report(device)
        here = [m.model for m in report.models if m.state not in ABSENT_STATES] if report else []
        return next((model for model in (*coming, *here) if model not in leaving), None)

    def _is_active(self, device: str, model: str) -> bool:
        """Returns whether requests may start. A route is needed as well, see `bind`."""
        state = self._state
        return device not in state.demands.drained and state.book.state(device, model) == "active"

    def _estimate(self, now_s: float) -> None:
        """Estimates the speeds of the models that an instance serves."""
        if not self._estimates.renew(now_s):
            return
        problem = self._estimates.problem
        degrees = {hosted.model: u.tp for u in self._instances() for hosted in u.models}
        known = {model.name for model in problem.models}
        self._tokens_per_s = {
            name: self._speed(problem, name, tp) for name, tp in degrees.items() if name in known
        }
        self._swap_s = {name: self._estimates.swap_s(name) for name in self._tokens_per_s}

    def _speed(self, problem: Problem, name: str, tp: int) -> float:
        times = problem.times
        assert times is not None
        model = next(model for model in problem.models if model.name == name)
        tokens = model.prompt_tokens + model.output_tokens
        capacity_bytes = min((d.capacity_bytes for d in problem.devices), default=0)
        return tokens_per_s(
            lambda batch: times.decode_s(name, tp, batch, tokens, 1.0),
            capacity_bytes * tp - model.held_bytes(tp),
            model.token_bytes * tokens,
            self._state.config.engine.max_running,
        )
