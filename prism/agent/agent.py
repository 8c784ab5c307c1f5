"""One device's agent: the parts, wired, and the loops that drive them."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import zmq.asyncio

from kvcached import Device, KvcachedError
from prism.agent.activations import TraceFile, trace_path
from prism.agent.admission import DevicePort
from prism.agent.delivery import Delivery
from prism.agent.effects import AgentEffects
from prism.agent.engines import EngineLink
from prism.agent.errands import Errands
from prism.agent.frontends import FrontendWatch
from prism.agent.inbox import CancelInbox, EngineInbox, OrderInbox
from prism.agent.intake import Intake
from prism.agent.lease import Lease
from prism.agent.lifecycle import Lifecycle
from prism.agent.memory import Reclaimer
from prism.agent.mirror import Mirror
from prism.agent.nursery import Nursery
from prism.agent.nursery_client import NurseryClient
from prism.agent.peers import PeerLedgers
from prism.agent.pool import Pool
from prism.agent.prefetch import Prefetcher
from prism.agent.reporter import Reporter
from prism.agent.reports import build_report
from prism.agent.scheduler_link import SchedulerLink
from prism.agent.serving import Parts, Serving
from prism.agent.state import State
from prism.agent.strays import Strays
from prism.agent.timing import Timing
from prism.agent.turns import Turns
from prism.config import ClusterConfig
from prism.engines.kv_file import remove_abandoned
from prism.engines.nursery import load_adapter
from prism.errors import LeaseLostError, QueueUnavailableError
from prism.journal import open_journal
from prism.messages import ActionResult, AgentReport
from prism.policies import registry
from prism.queueing import RequestQueue
from prism.scheduler.journaled import JournaledScheduler
from prism.scheduler.local import Limits, LocalScheduler
from prism.weight_store import open_store

log = logging.getLogger(__name__)

_RETURN_S = 1.0  # for engines of other devices to end what they borrowed here


class Agent:
    """`run` serves the device until it is drained; make a new object for a new run.

    Making one raises what `kvcached.Device.open` raises.
    """

    def __init__(
        self, config: ClusterConfig, config_path: Path, device: str, timing: Timing | None = None
    ) -> None:
        self._config = config
        self._config_path = config_path
        self._name = device
        self._timing = timing or Timing()
        place = config.device(device)
        self._device = Device.open(
            device,
            capacity_bytes=place.capacity_bytes,
            page_bytes=place.page_bytes,
            namespace=config.namespace,
        )
        self._drain_timeout_s = config.engine.drain_timeout_s
        self._drain_action: int | None = None
        self._bound = False
        self._replaced = False
        self._stop = asyncio.Event()
        self._state = State(Pool(device, place.engines, place.sm_percent), self._timing)
        self._errands = Errands()
        self._strays = Strays(self._state)
        self._open_sockets()
        self._wire_serving()
        self._wire_control()

    def _open_sockets(self) -> None:
        config, self._context = self._config, zmq.asyncio.Context()
        self._link = EngineLink(self._context, config.agent_engines_endpoint(self._name))
        self._orders = SchedulerLink(self._context, config.scheduler_endpoint, self._name)
        self._queue = RequestQueue.connect(config.redis_url, config.namespace)
        self._delivery = Delivery(self._frontend_died)

    def _wire_serving(self) -> None:
        """The request's way."""
        peers = PeerLedgers(self._config.namespace, self._state.pool)
        self._reclaimer = Reclaimer(self._state, self._device, peers)
        port = DevicePort(self._state, self._device, self._reclaimer, peers)
        limits = Limits(prefill_chunk_tokens=self._config.engine.prefill_chunk_tokens)
        scheduler = self._local_scheduler(port, limits)
        self._mirror = Mirror(scheduler, lambda: time.time() - time.monotonic())
        self._lease = Lease(
            queue=self._queue,
            device=self._name,
            owner=f"{os.getpid()}-{uuid4().hex}",
            timing=self._timing,
            held=self._held,
            on_retaken=self._replay,
        )
        self._turns = Turns(self._lease, self._timing)
        parts = Parts(
            state=self._state,
            device=self._name,
            queue=self._queue,
            mirror=self._mirror,
            scheduler=scheduler,
            limits=limits,
            port=port,
            link=self._link,
            delivery=self._delivery,
            errands=self._errands,
        )
        self._serving = Serving(parts, self._turns.wake, time.time)
        self._intake = Intake(
            self._queue, self._name, self._timing, self._serving.arrived, self._serving.replayed
        )
        self._frontends = FrontendWatch(
            self._state, self._queue, self._known_frontends, self._frontend_died
        )

    def _local_scheduler(self, port: DevicePort, limits: Limits) -> LocalScheduler:
        order = registry.live(self._config.policy).order
        self._journal = open_journal(self._config, self._name, limits=limits)
        if self._journal is None:
            return LocalScheduler(port, limits, order)
        return JournaledScheduler(port, limits, order, self._journal, self._state.now_s)

    def _wire_control(self) -> None:
        """The model's way."""
        config = self._config
        self._reporter = Reporter(self._orders, self._report, config.scheduler.report_interval_s)
        weight_key = partial(load_adapter(config.engine.adapter).weight_key, device=self._name)
        self._prefetcher = Prefetcher(open_store(config), weight_key, self._reporter.answer)
        effects = AgentEffects(
            device=self._device,
            link=self._link,
            running=self._state.running,
            reclaimer=self._reclaimer,
            serving=self._serving,
            reporter=self._reporter,
            trace=TraceFile(trace_path(config, self._name), self._name),
            journal=self._journal,
        )
        self._lifecycle = Lifecycle(
            self._state, effects, config.engine.max_running, config.engine.drain_timeout_s
        )
        self._nursery = Nursery(self._state, self._lifecycle, self._start_nursery)
        self._cancels = CancelInbox(
            self._context, config.agent_cancel_endpoint(self._name), self._serving
        )

    # --- running ----------------------------------------------------------------------------

    def stop(self) -> None:
        """Begin to drain; `run` returns when that is over. For signal handlers of the loop."""
        self._stop.set()

    async def run(self) -> None:
        """Raises LeaseLostError when another agent serves the device, QueueUnavailableError when
        Redis is not there at the start, EngineError when engines cannot be started."""
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._lease.acquire()
            # Only now: binding takes the addresses away from whoever has them.
            self._link.bind()
            self._cancels.bind()
            self._bound = True
            tasks = [asyncio.create_task(loop) for loop in self._loops()]
            stopped = asyncio.create_task(self._stop.wait())
            await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                await self._drain()
        except LeaseLostError:
            self._replaced = True
            raise
        finally:
            await self._close(tasks)

    def _loops(self) -> list[Coroutine[Any, Any, None]]:
        engines = EngineInbox(self._state, self._link, self._lifecycle, self._serving)
        orders = OrderInbox(
            link=self._orders,
            models=self._state.models,
            lifecycle=self._lifecycle,
            reclaimer=self._reclaimer,
            prefetcher=self._prefetcher,
            reporter=self._reporter,
            on_drain=self._order_drain,
        )
        return [
            engines.run(),
            orders.run(),
            self._cancels.run(),
            self._intake.run(),
            self._turns.run(self._serving),
            self._lease.run(),
            self._frontends.run(),
            self._reporter.run(),
            self._nursery.run(),
            self._tick(),
            self._sweep(),
        ]

    async def _tick(self) -> None:
        while True:
            self._nursery.tick()
            self._lifecycle.tick()
            self._reclaimer.tick()
            self._prefetcher.tick()
            given_up = self._strays.given_up(self._mirror.counts())
            if given_up:
                self._serving.hand_back(given_up.__contains__)
            await asyncio.sleep(self._timing.tick_s)

    async def _sweep(self) -> None:
        """Agents of a machine share the folder: whoever is first removes."""
        while True:
            remove_abandoned(Path(self._config.moves_dir))
            await asyncio.sleep(self._timing.sweep_s)

    # --- the end ----------------------------------------------------------------------------

    def _order_drain(self, timeout_s: float, action_id: int) -> None:
        self._drain_timeout_s, self._drain_action = timeout_s, action_id
        self.stop()

    async def _drain(self) -> None:
        """Admit nothing more and let run what runs, for `drain_timeout_s` at most."""
        log.info("draining: %d requests run", len(self._state.running))
        self._serving.paused = True
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await self._state.running.empty.wait()
        except TimeoutError:
            log.warning("%d requests did not end in time", len(self._state.running))

    async def _close(self, tasks: list[asyncio.Task[None]]) -> None:
        """Loops, requests, engines, memory, lease, sockets, in this order. Raises the first error
        of a loop when all else is done."""
        self._serving.paused = True
        failed = [task for task in tasks if task.done() and not task.cancelled()]
        errors = [error for task in failed if (error := task.exception()) is not None]
        self._replaced |= any(isinstance(error, LeaseLostError) for error in errors)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._serving.end_all("the agent of this device stops")
        self._prefetcher.stop()
        await self._nursery.stop()
        self._leave_device()
        await self._leave_queue()
        if self._drain_action is not None:
            self._orders.send(ActionResult(self._drain_action, True))
        if self._journal is not None:
            self._journal.close()
        self._delivery.close()
        self._link.close()
        self._orders.close()
        self._cancels.close()
        self._context.term()
        if self._bound and not self._replaced:
            self._remove_sockets()
        if errors:
            raise errors[0]

    async def _leave_queue(self) -> None:
        try:
            await self._errands.run(self._queue, self._name, self._lease.epoch)
            await self._lease.release()
        except (QueueUnavailableError, LeaseLostError) as error:
            log.warning("%s", error)
        await self._queue.close()

    def _leave_device(self) -> None:
        """The ledger goes with us, unless the next agent has it: its engines may be about to
        start, so that nobody holds memory yet."""
        if self._replaced:
            self._device.close()
            return
        try:
            self._device.shrink(wait_s=_RETURN_S)
            self._device.destroy()
        except KvcachedError as error:
            log.error("the ledger of %s stays: %s", self._name, error)

    def _remove_sockets(self) -> None:
        """libzmq leaves the files of its ipc sockets behind. REQUIRES: the lease was not lost, or
        they would be those of the next agent."""
        config = self._config
        for endpoint in (
            config.agent_engines_endpoint(self._name),
            config.agent_cancel_endpoint(self._name),
        ):
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    # --- small connections ------------------------------------------------------------------

    def _report(self) -> AgentReport:
        return build_report(
            self._state,
            self._device,
            self._mirror.counts(),
            epoch=self._lease.epoch,
            time_unix_s=time.time(),
            cancel_endpoint=self._config.agent_cancel_endpoint(self._name),
        )

    def _start_nursery(self) -> Coroutine[Any, Any, NurseryClient]:
        return NurseryClient.start(self._config.engine.adapter, self._config_path, self._name)

    def _held(self) -> set[str]:
        return self._serving.held()

    def _replay(self) -> None:
        self._intake.replay()

    def _known_frontends(self) -> set[str]:
        return (
            self._state.running.frontends() | self._mirror.frontends() | self._delivery.frontends()
        )

    def _frontend_died(self, frontend_id: str) -> None:
        self._delivery.drop(frontend_id)
        self._serving.frontend_died(frontend_id)
