"""Path of models through the agent: the scheduler's orders, engines, reports."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from kvcached import Device, WeightKey
from prism import clock
from prism.agent.effects import AgentEffects
from prism.agent.engines.fork_supervisor import ForkServerClient, ForkServerSupervisor
from prism.agent.engines.lifecycle import Lifecycle
from prism.agent.engines.overdraft import MemoryWatch
from prism.agent.engines.reclaimer import Reclaimer
from prism.agent.engines.trace_file import TraceFile, trace_path
from prism.agent.inbox import EngineInbox, OrderInbox
from prism.agent.network.kv_transfer import KvNetwork
from prism.agent.network.prefetch import Prefetcher
from prism.agent.network.sockets import EngineLink, SchedulerLink
from prism.agent.reports import Reporter, build_report
from prism.agent.requests.serving import Serving
from prism.agent.state.device_state import DeviceState
from prism.config.checks.adapters import adapter_named
from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.endpoints import local_name
from prism.config.schema.machines import is_gpu
from prism.engines.weights.weight_store import open_peers, open_store
from prism.messages.agent import AgentReport
from prism.messages.model_spec import ModelSpec
from prism.scheduler.decision_journal import Sink


class Hosting:
    """Hosts models on a device's engines as the scheduler orders. Owns the engine processes.

    Args:
        name: the device's name in the cluster.
        device: its ledger.
        on_drain: see `OrderInbox`.
    """

    def __init__(
        self,
        config: ClusterConfig,
        config_path: Path,
        name: str,
        state: DeviceState,
        *,
        device: Device,
        engines: EngineLink,
        scheduler: SchedulerLink,
        kv: KvNetwork,
        reclaimer: Reclaimer,
        serving: Serving,
        on_drain: Callable[[float, int], None],
        journal: Sink | None,
    ) -> None:
        self._config, self._config_path = config, config_path
        self._name, self._local_name = name, local_name(name)
        self._state = state
        self._device = device
        self._reclaimer = reclaimer
        self._serving = serving
        self._reporter = Reporter(scheduler, self._report, config.report_interval_s)
        store = open_store(config.local())
        answer, peers = self._reporter.answer, open_peers(config, store)
        self._prefetcher = Prefetcher(store, self._weight_key, answer, peers)
        trace = TraceFile(trace_path(config, self._local_name), self._local_name)
        effects, limits = self._effects(engines, kv, trace, journal), config.engine
        self._lifecycle = Lifecycle(state, effects, limits.max_running, limits.drain_timeout_s)
        self._watch = MemoryWatch(
            state,
            device,
            is_gpu=is_gpu(name),
            slack_bytes=limits.memory_slack_bytes,
            replace=self._lifecycle.replace,
        )
        self._fork_servers = [
            ForkServerSupervisor(
                state, self._lifecycle, partial(self._start_fork_server, adapter), adapter
            )
            for adapter in state.pool.adapters
        ]
        self._engine_inbox = EngineInbox(
            state,
            engines,
            self._lifecycle,
            serving.running,
            self._watch.check_soon,
            trace=trace,
            steps=serving.steps,
        )
        self._order_inbox = OrderInbox(
            scheduler=scheduler,
            models=state.models,
            lifecycle=self._lifecycle,
            reclaimer=reclaimer,
            prefetcher=self._prefetcher,
            reporter=self._reporter,
            on_drain=on_drain,
        )

    def _effects(
        self, engines: EngineLink, kv: KvNetwork, trace: TraceFile, journal: Sink | None
    ) -> AgentEffects:
        return AgentEffects(
            device=self._device,
            engines=engines,
            requests=self._state.requests,
            kv=kv,
            reclaimer=self._reclaimer,
            running=self._serving.running,
            reporter=self._reporter,
            trace=trace,
            journal=journal,
        )

    def periodic_loops(self) -> list[Coroutine[Any, Any, None]]:
        return [self._reporter.run(), self._watch.run()]

    def message_loops(self) -> list[Coroutine[Any, Any, None]]:
        """Returns the loops that may wait for messages indefinitely."""
        fork_servers = [fork_server.run() for fork_server in self._fork_servers]
        return [self._engine_inbox.run(), self._order_inbox.run(), *fork_servers]

    def tick(self) -> None:
        self._lifecycle.tick()
        for fork_server in self._fork_servers:
            fork_server.tick()
        self._reclaimer.tick()
        self._prefetcher.tick()

    async def stop(self) -> None:
        """Cancels prefetches and ends all engines."""
        self._prefetcher.stop()
        await asyncio.gather(*(fork_server.stop() for fork_server in self._fork_servers))

    def _report(self) -> AgentReport:
        return build_report(
            self._state,
            self._device,
            name=self._name,
            epoch=self._serving.lease.epoch,
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
