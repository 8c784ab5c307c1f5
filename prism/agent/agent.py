"""Agent of one device: the wiring of its parts, and the loops that drive them."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import zmq.asyncio

from kvcached import Device, KvcachedError, WeightKey
from prism import clock
from prism.agent import reload
from prism.agent.effects import AgentEffects
from prism.agent.engines.fork_supervisor import ForkServerClient, ForkServerSupervisor
from prism.agent.engines.lifecycle import Lifecycle
from prism.agent.engines.overdraft import MemoryWatch
from prism.agent.engines.reclaimer import PeerLedgers, Reclaimer
from prism.agent.engines.trace_file import TraceFile, trace_path
from prism.agent.inbox import CancelInbox, EngineInbox, OrderInbox
from prism.agent.network.kv_transfer import KvNetwork
from prism.agent.network.prefetch import Prefetcher
from prism.agent.network.sockets import EngineLink, SchedulerLink, TokenSender, remove_files
from prism.agent.reports import Reporter, build_report
from prism.agent.requests.admission import EngineViews
from prism.agent.requests.queue import (
    AdmissionLoop,
    FrontendWatch,
    Lease,
    OrphanedRequests,
    QueueReader,
)
from prism.agent.requests.serving import Serving
from prism.agent.state.device_state import AgentTiming, DeviceState
from prism.agent.state.engine_pool import EnginePool
from prism.agent.state.request_table import RequestTable
from prism.config.checks.adapters import adapter_named
from prism.config.knobs import live_policy
from prism.config.resolved import ConfigFile
from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.endpoints import local_name
from prism.config.schema.machines import is_gpu
from prism.engines.kv_moves.kv_file import remove_abandoned
from prism.engines.weights.weight_store import open_peers, open_store
from prism.errors import LeaseLostError, QueueUnavailableError
from prism.messages.agent import ActionResult, AgentReport
from prism.messages.models import ModelSpec
from prism.process import LoopWatchdog
from prism.queueing import RequestQueue
from prism.scheduler.journal import QueueJournal, open_journal
from prism.scheduler.local import Limits, LocalScheduler
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
        self._config = config
        self._config_path = config_path
        self._file = ConfigFile(config_path, config)
        self._name, self._local_name = device, local_name(device)
        self._local = local = config.local()
        self._timing = timing or AgentTiming()
        place = config.device(device)
        self._device = Device.open(
            self._local_name,
            capacity_bytes=place.capacity_bytes,
            page_bytes=place.page_bytes,
            namespace=local.namespace,
        )
        self._drain_timeout_s: float = config.engine.drain_timeout_s
        self._drain_action: int | None = None
        self._bound = False
        self._replaced = False
        self._stop = asyncio.Event()
        self._limits = Limits(prefill_chunk_tokens=config.engine.prefill_chunk_tokens)
        self._state = DeviceState(
            EnginePool(
                self._local_name, place.engines, place.sm_percent, config.adapters_on(device)
            ),
            self._timing,
            requests=RequestTable(self._local_scheduler()),
        )
        self._orphans = OrphanedRequests(self._state)
        self._open_sockets()
        self._wire_serving()
        self._wire_control()

    def _open_sockets(self) -> None:
        config, self._context = self._config, zmq.asyncio.Context()
        self._link = EngineLink(self._context, config.agent_engines_endpoint(self._name))
        self._orders = SchedulerLink(self._context, config, self._name)
        self._queue = RequestQueue.connect(config.redis_url, config.namespace)
        self._kv = KvNetwork(config, self._name, self._state)

    def _wire_serving(self) -> None:
        """Makes the parts on a request's path."""
        config = self._config
        peers = PeerLedgers(self._local.namespace, self._state.pool)
        self._reclaimer = Reclaimer(self._state, self._device, peers)
        self._lease = Lease(
            queue=self._queue,
            device=self._name,
            timing=self._timing,
            retakes=not config.node,
            held=self._state.requests.running_ids,
            on_retaken=self._restore,
        )
        key, owner = config.cluster_key, self._lease.owner
        self._tokens = TokenSender(config.frontend_endpoint, self._frontend_died, key, owner)
        self._admission = AdmissionLoop(self._lease, self._state)
        self._serving = Serving(
            state=self._state,
            views=EngineViews(self._state, self._device, peers),
            reclaimer=self._reclaimer,
            queue=self._queue,
            device=self._name,
            engines=self._link,
            tokens=self._tokens,
            wake=self._admission.wake,
            headroom_tokens=self._limits.headroom_tokens,
            send_kv=self._kv.sender.begin,
        )
        self._reader = QueueReader(
            self._queue,
            self._name,
            self._timing,
            on_entry=self._serving.arrived,
            on_replayed=self._serving.replayed,
            set_aside=self._set_aside,
        )
        self._frontends = FrontendWatch(
            self._state, self._queue, self._known_frontends, self._frontend_died
        )

    def _local_scheduler(self) -> LocalScheduler:
        config = self._config
        order = live_policy(config).order
        self._journal = open_journal(
            config.journal,
            Path(config.run_dir),
            self._local_name,
            config.policy,
            limits=self._limits,
        )
        journal = self._journal
        observer = None if journal is None else QueueJournal(journal, time.monotonic)
        return LocalScheduler(self._limits, order, observer)

    def _wire_control(self) -> None:
        """Makes the parts on a model's path."""
        config = self._config
        self._reporter = Reporter(self._orders, self._report, config.report_interval_s)
        store = open_store(self._local)
        answer, peers = self._reporter.answer, open_peers(config, store)
        self._prefetcher = Prefetcher(store, self._weight_key, answer, peers)
        self._trace = TraceFile(trace_path(config, self._local_name), self._local_name)
        effects = AgentEffects(
            device=self._device,
            link=self._link,
            requests=self._state.requests,
            kv=self._kv,
            reclaimer=self._reclaimer,
            serving=self._serving,
            reporter=self._reporter,
            trace=self._trace,
            journal=self._journal,
        )
        self._lifecycle = Lifecycle(
            self._state, effects, config.engine.max_running, config.engine.drain_timeout_s
        )
        self._watch = MemoryWatch(
            self._state,
            self._device,
            is_gpu=is_gpu(self._name),
            slack_bytes=config.engine.memory_slack_bytes,
            replace=self._lifecycle.replace,
        )
        self._fork_servers = [
            ForkServerSupervisor(
                self._state, self._lifecycle, partial(self._start_fork_server, adapter), adapter
            )
            for adapter in self._state.pool.adapters
        ]
        self._cancels = CancelInbox(
            self._context,
            config.own_cancel_endpoints(self._name),
            self._serving,
            on_gone=self._frontend_gone,
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
            await self._lease.acquire()
            # After the lease, because binding takes the addresses from another agent.
            self._link.bind()
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
        engines = EngineInbox(
            self._state,
            self._link,
            self._lifecycle,
            self._serving,
            self._watch.check_soon,
            trace=self._trace,
        )
        orders = OrderInbox(
            link=self._orders,
            models=self._state.models,
            lifecycle=self._lifecycle,
            reclaimer=self._reclaimer,
            prefetcher=self._prefetcher,
            reporter=self._reporter,
            on_drain=self._order_drain,
        )
        periodic = (
            self._reader.run(),
            self._admission.run(self._serving),
            self._lease.run(),
            self._frontends.run(),
            self._reporter.run(),
            self._watch.run(),
            self._tick(),
        )
        # Without a watchdog, because these may wait for messages indefinitely.
        waiting = [engines.run(), orders.run(), self._cancels.run(), self._sweep()]
        waiting += [reload.watch(self._file, self._orders, self._tokens, self._kv.peers)]
        waiting += [each.run() for each in self._fork_servers]
        return [*map(watchdog.watch, periodic), *waiting]

    async def _tick(self) -> None:
        while True:
            self._lifecycle.tick()
            for fork_server in self._fork_servers:
                fork_server.tick()
            self._reclaimer.tick()
            self._prefetcher.tick()
            self._kv.tick()
            given_up = self._orphans.given_up(self._state.requests.waiting_counts())
            if given_up:
                self._serving.unplace(given_up)
            await asyncio.sleep(self._timing.tick_s)

    async def _sweep(self) -> None:
        """Removes KV files that no engine fetched. All agents of a machine share the folder."""
        while True:
            remove_abandoned(Path(self._local.moves_dir))
            await asyncio.sleep(self._timing.sweep_s)

    # --- drain and close --------------------------------------------------------------------

    def _order_drain(self, timeout_s: float, action_id: int) -> None:
        self._drain_timeout_s, self._drain_action = timeout_s, action_id
        self.stop()

    async def _drain(self) -> None:
        """Stops admission and waits for running requests, for `drain_timeout_s` at most."""
        log.info("draining: %d requests run", len(self._state.requests.running_ids()))
        self._serving.paused = True
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await self._state.requests.none_runs.wait()
        except TimeoutError:
            log.warning("%d requests did not end in time", len(self._state.requests.running_ids()))

    async def _close(self, tasks: list[asyncio.Task[None]]) -> None:
        """Ends loops, requests, engines, memory, lease and sockets, in this order.

        Raises the first error of a loop after all else is done.
        """
        self._serving.paused = True
        failed = [task for task in tasks if task.done() and not task.cancelled()]
        errors = [error for task in failed if (error := task.exception()) is not None]
        self._replaced |= any(isinstance(error, LeaseLostError) for error in errors)
        await cancel_all(tasks)
        self._serving.fail_all("the agent of this device stops")
        await self._kv.close()
        self._prefetcher.stop()
        await asyncio.gather(*(fork_server.stop() for fork_server in self._fork_servers))
        self._leave_device()
        await self._leave_queue()
        if self._drain_action is not None:
            self._orders.send(ActionResult(self._drain_action, True))
        if self._journal is not None:
            self._journal.close()
        self._tokens.close()
        self._link.close()
        self._orders.close()
        self._cancels.close()
        self._context.term()
        if self._bound and not self._replaced:  # else the files belong to the next agent
            remove_files([self._config.agent_engines_endpoint(self._name)])
            remove_files(self._config.own_cancel_endpoints(self._name))
        if errors:
            raise errors[0]

    async def _leave_queue(self) -> None:
        try:
            await self._state.requests.outbox.flush(self._queue, self._name, self._lease.epoch)
            await self._lease.release()
        except (QueueUnavailableError, LeaseLostError) as error:
            log.warning("%s", error)
        await self._queue.close()

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

    # --- callbacks --------------------------------------------------------------------------

    def _report(self) -> AgentReport:
        return build_report(
            self._state,
            self._device,
            name=self._name,
            epoch=self._lease.epoch,
            time_unix_s=clock.unix_s(),
            gpu=self._watch.memory,
        )

    def _start_fork_server(self, adapter: str) -> Coroutine[Any, Any, ForkServerClient]:
        config, name = self._config, self._local_name
        preloaded = config.preloaded_path(name, adapter) if config.preloaded else None
        python = config.engine.python.get(adapter, sys.executable)
        return ForkServerClient.start(adapter, self._config_path, name, preloaded, python)

    def _weight_key(self, content: str, spec: ModelSpec, rank: int, ranks: int) -> WeightKey:
        adapter = adapter_named(self._config.adapter_of(spec))
        key: WeightKey = adapter.weight_key(content, spec, rank, ranks, self._local_name)
        return key

    def _restore(self) -> None:
        self._frontends.reset()
        self._reader.replay()
        self._state.requests.register()
        self._admission.wake()

    async def _set_aside(self, entries: Mapping[str, tuple[str, int]]) -> None:
        frontends = await self._queue.set_aside(self._name, self._lease.epoch, entries)
        self._serving.malformed(entries, frontends)

    def _known_frontends(self) -> set[str]:
        return self._state.requests.frontends() | self._tokens.frontends()

    async def _frontend_gone(self, frontend_id: str) -> None:
        """Handles a frontend whose process ended: unlike a silent one, it cannot come back."""
        log.info("frontend %s has ended: its requests are cancelled", frontend_id)
        self._serving.frontend_gone(frontend_id)
        self._tokens.drop(frontend_id)
        try:
            await self._queue.remove_frontend(frontend_id)
        except QueueUnavailableError as error:
            log.warning("the keys of frontend %s in Redis are not removed: %s", frontend_id, error)

    def _frontend_died(self, frontend_id: str) -> None:
        self._serving.frontend_died(frontend_id)
        self._tokens.drop(frontend_id)
