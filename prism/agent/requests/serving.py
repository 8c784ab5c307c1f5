"""Path of requests through the agent: the device's queue, engines, frontends.

Everything here runs in one event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from prism.agent.engines.reclaimer import Reclaimer
from prism.agent.network.kv_transfer import KvNetwork
from prism.agent.network.sockets import EngineLink, TokenSender
from prism.agent.requests.admission import Admission, AdmissionLoop
from prism.agent.requests.arrivals import Arrivals
from prism.agent.requests.controlled_steps import ControlledSteps
from prism.agent.requests.engine_views import EngineViews
from prism.agent.requests.queue import (
    FrontendWatch,
    Lease,
    OrphanedRequests,
    QueueReader,
)
from prism.agent.requests.running import RunningRequests
from prism.agent.state.device_state import DeviceState
from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import LeaseLostError, QueueUnavailableError
from prism.queueing import RequestQueue
from prism.scheduler.local_scheduler import Limits

log = logging.getLogger(__name__)


class Serving:
    """Serves the requests of a device's queue. Owns its lease. The agent closes `tokens`.

    Args:
        name: the device's name in the cluster.
        make_steps: makes the step control of the device, if the policy controls steps.
    """

    def __init__(
        self,
        config: ClusterConfig,
        name: str,
        state: DeviceState,
        *,
        views: EngineViews,
        reclaimer: Reclaimer,
        engines: EngineLink,
        kv: KvNetwork,
        limits: Limits,
        make_steps: Callable[[RunningRequests], ControlledSteps] | None = None,
    ) -> None:
        self._name, self._requests = name, state.requests
        self._queue = queue = RequestQueue.connect(config.redis_url, config.namespace)
        self.lease = Lease(
            queue=queue,
            device=name,
            timing=state.timing,
            retakes=not config.node,
            held=state.requests.running_ids,
            on_retaken=self._restore,
        )
        key, owner = config.cluster_key, self.lease.owner
        self.tokens = TokenSender(config.frontend_endpoint, self._frontend_died, key, owner)
        self.running = RunningRequests(
            state,
            device=name,
            engines=engines,
            tokens=self.tokens,
            headroom_tokens=limits.headroom_tokens,
            send_kv=kv.sender.begin,
        )
        self.arrivals = Arrivals(state.requests, self.running, self.tokens)
        self.steps = make_steps(self.running) if make_steps is not None else None
        self.admission = Admission(
            state,
            views=views,
            reclaimer=reclaimer,
            queue=queue,
            device=name,
            running=self.running,
            steps=self.steps,
        )
        self._loop = AdmissionLoop(self.lease, self.admission, state)
        self._reader = QueueReader(
            queue,
            name,
            state.timing,
            on_entry=self.arrivals.arrived,
            on_replayed=self.arrivals.replayed,
            set_aside=self._set_aside,
        )
        self._frontends = FrontendWatch(state, queue, self._known_frontends, self._frontend_died)
        self._orphans = OrphanedRequests(state)

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        return [self._reader.run(), self._loop.run(), self.lease.run(), self._frontends.run()]

    def tick(self) -> None:
        """Places requests again whose model is not here. Call every `tick_s`."""
        self._orphans.tick()

    async def frontend_gone(self, frontend_id: str) -> None:
        """Handles a frontend whose process ended: unlike a silent one, it cannot come back."""
        log.info("frontend %s has ended: its requests are cancelled", frontend_id)
        self.arrivals.frontend_gone(frontend_id)
        self.tokens.drop(frontend_id)
        try:
            await self._queue.remove_frontend(frontend_id)
        except QueueUnavailableError as error:
            log.warning("the keys of frontend %s in Redis are not removed: %s", frontend_id, error)

    async def leave_queue(self) -> None:
        """Sends the pending queue updates and releases the lease."""
        try:
            await self._requests.outbox.flush(self._queue, self._name, self.lease.epoch)
            await self.lease.release()
        except (QueueUnavailableError, LeaseLostError) as error:
            log.warning("%s", error)
        await self._queue.close()

    def _restore(self) -> None:
        self._frontends.reset()
        self._reader.replay()
        self._requests.register()
        self._requests.wake()

    async def _set_aside(self, entries: Mapping[str, tuple[str, int]]) -> None:
        frontends = await self._queue.set_aside(self._name, self.lease.epoch, entries)
        self.arrivals.malformed(entries, frontends)

    def _known_frontends(self) -> set[str]:
        return self._requests.frontends() | self.tokens.frontends()

    def _frontend_died(self, frontend_id: str) -> None:
        self.arrivals.frontend_died(frontend_id)
        self.tokens.drop(frontend_id)
