"""Agents without devices, for `cluster_load.py`.

The link, the lease, the queue reader and the reports of each agent are those of the product. A stub
executes the scheduler's orders after the time of an activation.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio
from msgspec import structs

from prism.agent.network.sockets import SchedulerLink
from prism.agent.reports import Reporter
from prism.agent.requests.queue import Lease, QueueReader
from prism.agent.state.device_state import AgentTiming
from prism.config.resolved import read_resolved
from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.endpoints import node_of
from prism.messages.agent import ActionResult, ActivateModel, AgentReport, EvictModel, ModelReport
from prism.messages.requests import Request
from prism.queueing.request_queue import RequestQueue

STAGES = ("engine", "shrink", "map", "weights", "kv", "graphs", "total")


@dataclass
class Found:
    """Counts of a process of stubs.

    `cold_s`: waiting time of each request for an inactive model, without the activation itself.
    """

    counts: Counter[str]
    cold_s: list[float]
    cpu_s: float


class StubAgent:
    """Agent of one device. Serves requests for active models at once."""

    def __init__(self, config: ClusterConfig, device: str, action_s: float) -> None:
        self._config, self._device, self._action_s = config, config.device(device), action_s
        self._context = zmq.asyncio.Context()
        self._queue = RequestQueue.connect(config.redis_url, config.namespace)
        self._link = SchedulerLink(self._context, config, device)
        self._reporter = Reporter(self._link, self._report, config.report_interval_s)
        self._lease = Lease(
            queue=self._queue,
            device=device,
            timing=AgentTiming(),
            held=tuple,
            retakes=True,
            on_retaken=lambda: None,
        )
        self._models: dict[str, str] = {}
        self._active_since: dict[str, float] = {}
        self._last_request: dict[str, float] = defaultdict(float)
        self._finished: Counter[str] = Counter()
        self._waiting: dict[str, Request] = {}
        self._arrivals = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self.cold_s: list[float] = []

    async def run(self) -> None:
        await self._lease.acquire()
        reader = QueueReader(
            self._queue,
            self._device.name,
            AgentTiming(),
            on_entry=self._arrived,
            on_replayed=lambda _: None,
            set_aside=lambda _: asyncio.sleep(0),
        )
        loops = (self._lease.run(), reader.run(), self._reporter.run(), self._obey(), self._serve())
        await asyncio.gather(*loops)

    def _report(self) -> AgentReport:
        device, self.counts["reports"] = self._device, self.counts["reports"] + 1
        taken = device.capacity_bytes // device.engines * len(self._models)
        waiting = Counter(request.model for request in self._waiting.values())
        return AgentReport(
            device=device.name,
            epoch=self._lease.epoch,
            time_unix_s=time.time(),
            capacity_bytes=device.capacity_bytes,
            page_bytes=device.page_bytes,
            reserved_bytes=taken,
            committed_bytes=taken,
            resident_bytes=taken,
            engines_free=device.engines - len(self._models),
            engines_starting=0,
            engines_total=device.engines,
            models=[self._model(name, state, waiting) for name, state in self._models.items()],
        )

    def _model(self, name: str, state: str, waiting: Counter[str]) -> ModelReport:
        seconds = dict.fromkeys(STAGES, self._action_s)
        return ModelReport(
            model=name,
            state=state,
            waiting=waiting[name],
            engine_id=f"{self._device.name}-e0",
            last_request_unix_s=self._last_request[name],
            prompt_tokens_total=100 * self._finished[name],
            output_tokens_total=100 * self._finished[name],
            finished_total=self._finished[name],
            stages_s=seconds,
            stages_total_s=seconds,
        )

    async def _obey(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                order = await self._link.receive()
                if isinstance(order, ActivateModel):
                    group.create_task(self._activate(order))
                elif isinstance(order, EvictModel):
                    group.create_task(self._evict(order))
                else:
                    self._link.send(ActionResult(order.action_id, True))

    async def _activate(self, order: ActivateModel) -> None:
        name = order.model.name
        self._models[name] = "activating"
        self._reporter.changed()
        await asyncio.sleep(self._action_s)
        self._models[name], self._active_since[name] = "active", time.time()
        self.counts["activated"] += 1
        self._reporter.answer(ActionResult(order.action_id, True, seconds=self._action_s))
        self._arrivals.set()

    async def _evict(self, order: EvictModel) -> None:
        self._models[order.model] = "draining"
        self._reporter.changed()
        await asyncio.sleep(self._action_s / 10)
        del self._models[order.model]
        self.counts["evicted"] += 1
        self._reporter.answer(ActionResult(order.action_id, True))

    def _arrived(self, entry: str, request: Request) -> None:
        self._waiting[entry] = request
        self._arrivals.set()

    async def _serve(self) -> None:
        """Serves all waiting requests of active models at once."""
        while True:
            await self._arrivals.wait()
            self._arrivals.clear()
            up = {name for name, state in self._models.items() if state == "active"}
            ready = [entry for entry, request in self._waiting.items() if request.model in up]
            ran = await self._queue.admit(self._device.name, self._lease.epoch, ready)
            done = [self._waiting.pop(entry) for entry in ready]
            served = [self._note(request) for request in done if ran]
            await self._queue.finish(self._device.name, self._lease.epoch, served)

    def _note(self, request: Request) -> str:
        self._finished[request.model] += 1
        self._last_request[request.model] = time.time()
        self.counts["served"] += 1
        if request.arrival_unix_s < self._active_since[request.model]:
            self.cold_s.append(time.time() - request.arrival_unix_s - self._action_s)
        return request.id


def stubs(
    config_path: Path, devices: Sequence[str], action_s: float, begin_unix_s: float, seconds: float
) -> Found:
    """Runs these devices. Counting begins at `begin_unix_s` and lasts for `seconds`."""
    return asyncio.run(_stubs(read_resolved(config_path), devices, action_s, begin_unix_s, seconds))


async def _stubs(
    config: ClusterConfig,
    devices: Sequence[str],
    action_s: float,
    begin_unix_s: float,
    seconds: float,
) -> Found:
    agents = [StubAgent(_on_its_machine(config, name), name, action_s) for name in devices]
    running = asyncio.gather(*(agent.run() for agent in agents))
    await asyncio.wait([running], timeout=begin_unix_s - time.time())
    for agent in agents:
        agent.counts.clear()
        agent.cold_s.clear()
    cpu_s = time.process_time()
    await asyncio.wait([running], timeout=seconds)
    if running.done():
        running.result()
    counts = sum((agent.counts for agent in agents), Counter[str]())
    cold_s = [each for agent in agents for each in agent.cold_s]
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    return Found(counts, cold_s, time.process_time() - cpu_s)


def _on_its_machine(config: ClusterConfig, device: str) -> ClusterConfig:
    """Returns the agent's configuration. Other machines than the scheduler's have a separate folder
    without the scheduler's socket.
    """
    node = node_of(device)
    if node == config.node:
        return config
    return structs.replace(config, node=node, run_dir=f"{config.run_dir}/{node}")
