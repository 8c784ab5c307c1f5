"""Agent of one device: the paths of requests and of models, from the start to the drain."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import zmq.asyncio

from kvcached import Device, KvcachedError
from prism.agent import agent_reload
from prism.agent.engines.reclaimer import PeerLedgers, Reclaimer
from prism.agent.hosting import Hosting
from prism.agent.inbox import CancelInbox
from prism.agent.network.kv_transfer import KvNetwork
from prism.agent.network.sockets import EngineLink, SchedulerLink, remove_files
from prism.agent.requests.controlled_steps import ControlledSteps
from prism.agent.requests.engine_views import EngineViews
from prism.agent.requests.running import RunningRequests
from prism.agent.requests.serving import Serving
from prism.agent.state.device_state import AgentTiming, DeviceState
from prism.agent.state.engine_pool import EnginePool
from prism.agent.state.request_table import RequestTable
from prism.config.policy_knobs import live_policy
from prism.config.resolved import ConfigFile
from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.endpoints import local_name
from prism.engines.kv_moves.kv_file import remove_abandoned
from prism.errors import LeaseLostError
from prism.messages.agent import ActionResult
from prism.process import LoopWatchdog
from prism.scheduler.decision_journal import QueueJournal, open_journal
from prism.scheduler.local_scheduler import Limits, LocalScheduler
from prism.tasks import cancel_all

log = logging.getLogger(__name__)

_RETURN_S = 5.0  # for engines of other devices to return memory that they borrowed here


class Agent:
    """Agent of one device. An object serves one run.

    The constructor raises what `kvcached.Device.open` raises.
    """

    def __init__(
        self,
        config: ClusterConfig,
        config_path: Path,
        device: str,
        timing: AgentTiming | None = None,
    ) -> None:
        self._config, self._name = config, device
        self._file = ConfigFile(config_path, config)
        self._timing = timing or AgentTiming()
        self._drain_timeout_s: float = config.engine.drain_timeout_s
        self._drain_action: int | None = None
        self._bound = False
        self._replaced = False
        self._stop = asyncio.Event()
        place = config.device(device)
        self._device = Device.open(
            local_name(device),
            capacity_bytes=place.capacity_bytes,
            page_bytes=place.page_bytes,
            namespace=config.local().namespace,
        )
        limits = Limits(prefill_chunk_tokens=config.engine.prefill_chunk_tokens)
        run_dir, name = Path(config.run_dir), local_name(device)
        self._journal = open_journal(config.journal, run_dir, name, config.policy, limits=limits)
        self._state = self._new_state(limits)
        self._context = zmq.asyncio.Context()
        self._engines = EngineLink(self._context, config.agent_engines_endpoint(device))
        self._scheduler = SchedulerLink(self._context, config, device)
        self._kv = KvNetwork(config, device, self._state)
        self._wire(config_path, limits)

    def _new_state(self, limits: Limits) -> DeviceState:
        config, journal = self._config, self._journal
        observer = None if journal is None else QueueJournal(journal, time.monotonic)
        scheduler = LocalScheduler(limits, live_policy(config).order, observer)
        place, adapters = config.device(self._name), config.adapters_on(self._name)
        pool = EnginePool(local_name(self._name), place.engines, place.sm_percent, adapters)
        controlled = live_policy(config).steps is not None
        table = RequestTable(scheduler)
        return DeviceState(pool, self._timing, requests=table, controlled=controlled)

    def _make_steps(
        self, reclaimer: Reclaimer
    ) -> Callable[[RunningRequests], ControlledSteps] | None:
        control = live_policy(self._config).steps
        if control is None:
            return None
        return lambda running: ControlledSteps(
            self._state,
            control,
            device=self._device,
            engines=self._engines,
            running=running,
            reclaim=reclaimer.reclaim_tokens,
            journal=self._journal,
        )

    def _wire(self, config_path: Path, limits: Limits) -> None:
        config, state = self._config, self._state
        peers = PeerLedgers(config.local().namespace, state.pool)
        reclaimer = Reclaimer(state, self._device, peers)
        self._serving = Serving(
            config,
            self._name,
            state,
            views=EngineViews(state, self._device, peers),
            reclaimer=reclaimer,
            engines=self._engines,
            kv=self._kv,
            limits=limits,
            make_steps=self._make_steps(reclaimer),
        )
        self._hosting = Hosting(
            config,
            config_path,
            self._name,
            state,
            device=self._device,
            engines=self._engines,
            scheduler=self._scheduler,
            kv=self._kv,
            reclaimer=reclaimer,
            serving=self._serving,
            on_drain=self._order_drain,
            journal=self._journal,
        )
        self._cancels = CancelInbox(
            self._context,
            config.own_cancel_endpoints(self._name),
            self._serving.arrivals,
            on_gone=self._serving.frontend_gone,
            on_kv=self._kv.take,
            secret=config.cluster_key,
        )

    # --- running ----------------------------------------------------------------------------

    def stop(self) -> None:
        """Starts to drain; `run` returns at the end of that. For signal handlers of the loop."""
        self._stop.set()

    async def run(self, watchdog: LoopWatchdog | None = None) -> None:
        """Serves the device until it is drained.

        Raises:
            LeaseLostError: another agent serves the device.
            QueueUnavailableError: Redis cannot be reached at the start.
            EngineError: engines cannot be started.
        """
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._serving.lease.acquire()
            # After the lease, because binding takes the addresses from another agent.
            self._engines.bind()
            self._cancels.bind()
            self._bound = True
            tasks = [asyncio.create_task(loop) for loop in self._loops(watchdog or LoopWatchdog())]
            stopped = asyncio.create_task(self._stop.wait())
            await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                await self._drain()
        except LeaseLostError:
            self._replaced = True
            raise
        finally:
            await self._close(tasks)

    def _loops(self, watchdog: LoopWatchdog) -> list[Coroutine[Any, Any, None]]:
        periodic = [*self._serving.loops(), *self._hosting.periodic_loops(), self._tick()]
        # Without a watchdog, because these may wait for messages indefinitely.
        waiting = [*self._hosting.message_loops(), self._cancels.run(), self._sweep()]
        waiting += [
            agent_reload.watch(self._file, self._scheduler, self._serving.tokens, self._kv.peers)
        ]
        return [*map(watchdog.watch, periodic), *waiting]

    async def _tick(self) -> None:
        while True:
            self._hosting.tick()
            self._kv.tick()
            self._serving.tick()
            await asyncio.sleep(self._timing.tick_s)

    async def _sweep(self) -> None:
        """Removes KV files that no engine fetched. All agents of a machine share the folder."""
        while True:
            remove_abandoned(Path(self._config.local().moves_dir))
            await asyncio.sleep(self._timing.sweep_s)

    # --- drain and close --------------------------------------------------------------------

    def _order_drain(self, timeout_s: float, action_id: int) -> None:
        self._drain_timeout_s, self._drain_action = timeout_s, action_id
        self.stop()

    async def _drain(self) -> None:
        """Stops admission and waits for running requests, for `drain_timeout_s` at most."""
        log.info("draining: %d requests run", len(self._state.requests.running_ids()))
        self._serving.admission.paused = True
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await self._state.requests.none_runs.wait()
        except TimeoutError:
            log.warning("%d requests did not end in time", len(self._state.requests.running_ids()))

    async def _close(self, tasks: list[asyncio.Task[None]]) -> None:
        """Ends loops, requests, engines, memory, lease and sockets, in this order.

        Raises the first error of a loop after all else is done.
        """
        self._serving.admission.paused = True
        if self._serving.steps is not None:
            self._serving.steps.close()
        failed = [task for task in tasks if task.done() and not task.cancelled()]
        errors = [error for task in failed if (error := task.exception()) is not None]
        self._replaced |= any(isinstance(error, LeaseLostError) for error in errors)
        await cancel_all(tasks)
        self._serving.running.fail_all("the agent of this device stops")
        await self._kv.close()
        await self._hosting.stop()
        self._leave_device()
        await self._serving.leave_queue()
        if self._drain_action is not None:
            self._scheduler.send(ActionResult(self._drain_action, True))
        if self._journal is not None:
            self._journal.close()
        self._serving.tokens.close()
        self._engines.close()
        self._scheduler.close()
        self._cancels.close()
        self._context.term()
        if self._bound and not self._replaced:  # else the files belong to the next agent
            remove_files([self._config.agent_engines_endpoint(self._name)])
            remove_files(self._config.own_cancel_endpoints(self._name))
        if errors:
            raise errors[0]

    def _leave_device(self) -> None:
        """Removes the ledger, unless the next agent uses it.

        The next agent may still have no engine, and only an engine prevents the removal.
        """
        if self._replaced:
            self._device.close()
            return
        try:
            self._device.shrink(wait_s=_RETURN_S)
            self._device.destroy()
        except KvcachedError as error:
            log.error("the ledger of %s is not removed: %s", self._name, error)
