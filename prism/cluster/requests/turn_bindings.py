"""Token-level switching in the live cluster: turns of models, and the requests that start in them.

Adapter of `prism/scheduler/token_turns.py`. A request waits in the unplaced queue until its group
or its model's turn, with its KV in host memory once it has a token. So it survives the loss of this
process, an agent or an engine. Turns are made anew after a restart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from prism.cluster.requests.decode_instances import DecodeInstances
from prism.cluster.requests.estimates import Estimates
from prism.cluster.requests.prefill_instances import PrefillInstances
from prism.cluster.requests.turn_instances import TurnCluster
from prism.cluster.state.scheduler_state import SchedulerState
from prism.policies.multiplexing.turns import TurnPolicy
from prism.policies.placement import Placement, Unit
from prism.policies.queues import QueuedRequest
from prism.queueing.request_queue import RequestQueue
from prism.scheduler.token_turns import prefill_count

POLL_S = 0.05
"""Interval of steps while several models want one instance: no message says that its requests have
ended."""


class TurnBindings:
    """Turns of all instances. REQUIRES: a placement was searched, except for `read`."""

    def __init__(self, state: SchedulerState, queue: RequestQueue, policy: TurnPolicy) -> None:
        self._state = state
        self._queue = queue
        self._policy = policy
        self._estimates = Estimates(state)
        cluster = TurnCluster(state, queue, policy, self._estimates)
        self._prefills, self._decodes = PrefillInstances(cluster), DecodeInstances(cluster)
        self._units: tuple[Unit, ...] = ()

    async def read(self) -> dict[str, int]:
        """Reads the waiting requests. Returns model -> their number. Raises
        QueueUnavailableError."""
        return await self._state.read_waiting(self._queue)

    async def step(self) -> None:
        """Chooses the models of all instances, and moves the requests that start. Raises
        QueueUnavailableError."""
        state = self._state
        await state.waiting.prune(self._queue)
        now_s = state.now_s()
        self._estimates.renew(now_s)
        self._set_instances()
        waiting = state.waiting.of({model.name for model in state.config.models})
        await self._prefills.step(self._fresh(waiting))
        await self._decodes.step([each for each in waiting if each.is_resumed], now_s)
        for instance in (*self._prefills.all, *self._decodes.all)[:1]:
            await state.waiting.bind_malformed(self._queue, instance.name)
        state.turns = (*self._prefills.turns(), *self._decodes.turns())

    def _fresh(self, waiting: Sequence[QueuedRequest]) -> list[QueuedRequest]:
        """Returns the requests without a token, if an instance can decode their model."""
        fresh = [request for request in waiting if not request.is_resumed]
        served = {m for m in {r.model for r in fresh} if self._decodes.serves(m)}
        return [request for request in fresh if request.model in served]

    @property
    def due_in_s(self) -> float:
        """Seconds until the next step is due for a model that waits; infinity without one."""
        shared = [each for each in self._decodes.all if len(each.models) > 1]
        has_groups = any(len(each.turns.groups) > 1 for each in self._prefills.all)
        if not (shared or has_groups or any(each.has_more for each in self._decodes.all)):
            return math.inf
        now_s = self._state.now_s()
        return min([POLL_S, *(each.until_s - now_s for each in shared if each.until_s > now_s)])

    def _set_instances(self) -> None:
        """Makes the units of the placement instances, without lost and drained devices."""
        target = self._state.target or Placement(())
        units = tuple(unit for unit in target.units if all(map(self._is_usable, unit.devices)))
        if units != self._units:
            self._units = units
            self._divide(units)

    def _is_usable(self, device: str) -> bool:
        state = self._state
        return device not in state.demands.drained and state.book.report(device) is not None

    def _divide(self, units: Iterable[Unit]) -> None:
        """Divides the units into those that prefill and those that decode. They keep their roles,
        as far as that is possible."""
        roles = {each.devices for each in self._prefills.all}
        degrees: dict[int, list[Unit]] = {}
        for unit in units:
            degrees.setdefault(unit.tp, []).append(unit)
        prefills: list[Unit] = []
        decodes: list[Unit] = []
        for same in degrees.values():
            if len(same) > 1:
                same.sort(key=lambda unit: unit.devices not in roles)
                first = prefill_count(self._policy.prefill_part, len(same))
                prefills += same[:first]
                decodes += same[first:]
        self._prefills.replace(prefills)
        self._decodes.replace(decodes)
