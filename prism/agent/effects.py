"""Effects of the state machine of models and engines, on the agent's other parts."""

from __future__ import annotations

import logging
import os
import signal
import time

from kvcached import Device
from prism.agent.engines.reclaimer import Reclaimer
from prism.agent.engines.trace_file import TraceFile
from prism.agent.network.kv_transfer import KvNetwork
from prism.agent.network.sockets import EngineLink
from prism.agent.reports import Reporter
from prism.agent.requests.running import RunningRequests
from prism.agent.state.device_state import HostedModel
from prism.agent.state.engine_pool import EngineProcess
from prism.agent.state.request_table import RequestTable
from prism.messages.agent import ActionResult
from prism.messages.engine import Activated, ToEngine
from prism.scheduler.decision_journal import Served, Sink

log = logging.getLogger(__name__)


class AgentEffects:
    """Implementation of `prism.agent.engines.lifecycle_effects.Effects`."""

    def __init__(
        self,
        *,
        device: Device,
        engines: EngineLink,
        requests: RequestTable,
        kv: KvNetwork,
        reclaimer: Reclaimer,
        running: RunningRequests,
        reporter: Reporter,
        trace: TraceFile,
        journal: Sink | None = None,
    ) -> None:
        self._device = device
        self._engines = engines
        self._requests = requests
        self._kv = kv
        self._reclaimer = reclaimer
        self._running = running
        self._reporter = reporter
        self._trace = trace
        self._journal = journal

    def send(self, engine_id: str, message: ToEngine) -> bool:
        return self._engines.send(engine_id, message)

    def move_running(self, hosted: HostedModel, targets: tuple[str, ...]) -> None:
        self.send(hosted.engine_id, self._kv.export(hosted, targets))

    def kill(self, engine: EngineProcess) -> None:
        if engine.pid and not engine.ended:
            try:
                os.kill(engine.pid, signal.SIGKILL)
            except ProcessLookupError:
                log.debug("%s has ended already", engine.id)
        self._device.reap()

    def engine_lost(self, engine_id: str, why: str, by_request: bool) -> bool:
        return self._running.engine_lost(engine_id, why, by_request)

    def engine_load(self, engine_id: str) -> int:
        return len(self._requests.on_engine(engine_id))

    def reclaim(self, need_bytes: int, for_engine: str) -> None:
        self._reclaimer.reclaim(need_bytes, for_engine)

    def answer(self, result: ActionResult) -> None:
        self._reporter.answer(result)

    def record(self, engine_id: str, activated: Activated) -> None:
        self._trace.add(engine_id, activated)
        if self._journal is not None:
            self._journal.add(
                Served(
                    time_s=time.monotonic(),
                    model=activated.model,
                    seconds=activated.stages_s["total"] - activated.stages_s["engine"],
                    static_bytes=activated.static_bytes,
                    reserve_bytes=activated.reserve_bytes,
                    quantum_bytes=activated.quantum_bytes,
                    quantum_tokens=activated.quantum_tokens,
                    block_tokens=activated.block_tokens,
                )
            )

    def replaced(self, engine: EngineProcess, model: str, why: str) -> None:
        self._trace.note("replaced", engine.id, {"model": model, "why": why})

    def changed(self) -> None:
        self._reporter.changed()
        self._requests.wake()
