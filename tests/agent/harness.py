"""Agent under test with a real Redis and real engines of a fake model.

Sockets of the test replace the scheduler and the frontends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

import kvcached
from prism.agent.device_agent import Agent
from prism.agent.state.device_state import AgentTiming
from prism.config.resolved import write_resolved
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig, EngineConfig
from prism.engines.fake import expected_tokens
from prism.messages.agent import (
    ActionResult,
    ActivateModel,
    AgentReport,
    Drain,
    EvictModel,
    FromScheduler,
    ModelReport,
)
from prism.messages.cluster import ToScheduler
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import (
    Cancel,
    Chunk,
    EngineOutput,
    Failure,
    Request,
    Sampling,
    ToAgent,
)
from prism.queueing import RequestQueue

DEVICE = "host:0"
PATIENCE_S = 60.0


def model_spec(name: str, num_layers: int = 2, num_kv_heads: int = 2) -> ModelSpec:
    layout = kvcached.Layout(num_layers, num_kv_heads, 32, dtype="float32")
    return ModelSpec(
        name=name,
        path="",
        architecture="Fake",
        dtype="float32",
        kv_dtype="float32",
        context_length=512,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=32,
        weight_bytes=1 << 20,
        token_bytes=layout.token_bytes,
        slo_ttft_s=10.0,
        slo_tpot_s=1.0,
    )


def make_config(
    run_dir: Path,
    namespace: str,
    redis_url: str,
    capacity_bytes: int = 16 << 20,
    engines: int = 2,
    *,
    policy: str = "prism",
) -> ClusterConfig:
    config = ClusterConfig(
        namespace=namespace,
        run_dir=str(run_dir),
        redis_url=redis_url,
        policy=policy,
        devices=[DeviceConfig(DEVICE, capacity_bytes, 64 << 10, engines)],
        models=[model_spec("a"), model_spec("b", num_layers=3, num_kv_heads=1), model_spec("c")],
        report_interval_s=0.1,
        engine=EngineConfig(
            adapter="fake",
            static_bytes=1 << 20,
            max_running=4,
            drain_timeout_s=10.0,
            weight_store="",
        ),
    )
    write_resolved(config, run_dir / "cluster.json")
    return config


async def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Waits until the condition holds; raises TimeoutError otherwise."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


class FakeScheduler:
    """Cluster scheduler's socket: keeps reports, sends orders, waits for their results."""

    def __init__(self, context: zmq.asyncio.Context, config: ClusterConfig) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(config.scheduler_endpoint)
        self._ids = itertools.count(1)
        self.config = config
        self.reports: list[AgentReport] = []
        self.results: dict[int, ActionResult] = {}
        self._asked: dict[int, asyncio.Future[None]] = {}

    async def run(self) -> None:
        while True:
            identity, frame = await self._socket.recv_multipart()
            assert identity == DEVICE.encode()
            message = msgspec.msgpack.decode(frame, type=ToScheduler)
            if isinstance(message, AgentReport):
                self.reports.append(message)
            elif isinstance(message, ActionResult):
                self.results[message.action_id] = message
                asked = self._asked.pop(message.action_id, None)
                if asked is not None and not asked.done():
                    asked.set_result(None)

    @property
    def report(self) -> AgentReport:
        return self.reports[-1]

    def model(self, name: str) -> ModelReport | None:
        return next((m for m in self.report.models if m.model == name), None)

    def state(self, name: str) -> str:
        model = self.model(name)
        return model.state if model else "absent"

    async def post(self, order: FromScheduler) -> int:
        """Sends the order under a fresh id, which it returns."""
        action_id = next(self._ids)
        order = msgspec.structs.replace(order, action_id=action_id)
        await self._socket.send_multipart([DEVICE.encode(), msgspec.msgpack.encode(order)])
        return action_id

    async def ask(self, order: FromScheduler, patience_s: float = PATIENCE_S) -> ActionResult:
        action_id = await self.post(order)
        if action_id not in self.results:
            self._asked[action_id] = asyncio.get_running_loop().create_future()
            await asyncio.wait_for(self._asked[action_id], patience_s)
        return self.results[action_id]

    async def activate(self, name: str) -> ActionResult:
        return await self.ask(ActivateModel(0, self.config.model(name)))

    async def evict(self, name: str) -> ActionResult:
        return await self.ask(EvictModel(0, name))

    async def ready(self) -> None:
        """Waits until reports arrive and all engines are free."""
        await until(lambda: self.reports and self.report.engines_free == self.report.engines_total)

    def close(self) -> None:
        self._socket.close()


@dataclass
class Stream:
    chunks: list[Chunk] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """Asserts that the positions are contiguous."""
        tokens: list[int] = []
        for chunk in self.chunks:
            assert chunk.first_index == len(tokens)
            tokens += chunk.token_ids
        return tokens

    @property
    def finish_reason(self) -> str | None:
        return self.chunks[-1].finish_reason if self.chunks else None

    @property
    def ended(self) -> bool:
        return bool(self.failures) or self.finish_reason is not None


class FakeFrontend:
    """Frontend's socket, heartbeat and log of streams."""

    def __init__(
        self, context: zmq.asyncio.Context, config: ClusterConfig, queue: RequestQueue, name: str
    ) -> None:
        self.name = name
        self._queue = queue
        self._inbox = context.socket(zmq.PULL)
        self._inbox.bind(config.frontend_endpoint(name))
        self._cancels = context.socket(zmq.PUSH)
        self._cancels.setsockopt(zmq.LINGER, 0)
        self._cancels.connect(config.agent_cancel_endpoint(DEVICE))
        self.streams: dict[str, Stream] = {}
        self._ids = itertools.count()

    async def run(self) -> None:
        while True:
            output = msgspec.msgpack.decode(await self._inbox.recv(), type=EngineOutput)
            for chunk in output.chunks:
                assert not self.stream(chunk.request_id).ended
                self.stream(chunk.request_id).chunks.append(chunk)
            for failure in output.failures:
                self.stream(failure.request_id).failures.append(failure)

    async def beat(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # outages are the subject of some tests
                await self._queue.beat(self.name, 2.0)
            await asyncio.sleep(0.5)

    def stream(self, request_id: str) -> Stream:
        return self.streams.setdefault(request_id, Stream())

    def request(
        self, model: str = "a", prompt_tokens: int = 20, max_tokens: int = 8, slo_s: float = 10.0
    ) -> Request:
        number = next(self._ids)
        return Request(
            id=f"{self.name}-{number}",
            model=model,
            prompt_ids=[number + 10, *range(100, 99 + prompt_tokens)],
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            arrival_unix_s=time.time(),
            slo_ttft_s=slo_s,
            slo_tpot_s=1.0,
            frontend_id=self.name,
        )

    async def send(self, count: int = 1, model: str = "a", **options: int) -> list[Request]:
        requests = [self.request(model, **options) for _ in range(count)]
        for request in requests:
            await self._queue.enqueue(request)
        return requests

    async def cancel(self, request_ids: Sequence[str]) -> None:
        await self.send_message(Cancel(list(request_ids)))

    async def send_message(self, message: ToAgent) -> None:
        await self._cancels.send(msgspec.msgpack.encode(message))

    async def finish(self, requests: Sequence[Request]) -> None:
        """Waits until all have ended; asserts that they got exactly the fake model's tokens."""
        await until(lambda: all(self.stream(r.id).ended for r in requests))
        for request in requests:
            stream = self.stream(request.id)
            assert not stream.failures, stream.failures
            count = request.sampling.max_tokens
            assert stream.token_ids == expected_tokens(request.prompt_ids, count)

    def close(self) -> None:
        self._inbox.close()
        self._cancels.close()


class World:
    """Agent in this event loop, whose fork server and engines are processes."""

    def __init__(self, config: ClusterConfig, timing: AgentTiming) -> None:
        self.config = config
        self.timing = timing
        self.context = zmq.asyncio.Context()
        self.queue = RequestQueue.connect(config.redis_url, config.namespace)
        self.scheduler = FakeScheduler(self.context, config)
        self.frontend = FakeFrontend(self.context, config, self.queue, "f0")
        self._listening = asyncio.create_task(self.frontend.run())
        self._tasks = [
            asyncio.create_task(self.scheduler.run()),
            self._listening,
            asyncio.create_task(self.frontend.beat()),
        ]
        self.agent: Agent | None = None
        self._running: asyncio.Task[None] | None = None

    def start_agent(self) -> None:
        path = Path(self.config.run_dir) / "cluster.json"
        self.agent = Agent(self.config, path, DEVICE, self.timing)
        self._running = asyncio.create_task(self.agent.run())

    async def stop_agent(self) -> None:
        """Drains the agent; raises the error that ended it."""
        if self._running is not None and self.agent is not None:
            self.agent.stop()
            running, self._running = self._running, None
            await asyncio.wait_for(running, PATIENCE_S)

    async def serve(self, *models: str) -> None:
        """Starts the agent and activates these models."""
        self.start_agent()
        await self.scheduler.ready()
        for model in models:
            result = await self.scheduler.activate(model)
            assert result.ok, result.message
            await self.queue.route(model, DEVICE)

    def stop_listening(self) -> None:
        """Stops the frontend's receive loop, so that the test can read its socket."""
        self._listening.cancel()

    def agent_requests(self) -> set[str]:
        """Returns the ids of all requests that the agent knows."""
        assert self.agent is not None
        table = self.agent._state.requests
        return {each.id for name in table.frontends() for each in table.of_frontend(name)}

    @property
    def device(self) -> kvcached.Device:
        return kvcached.Device.open(DEVICE, namespace=self.config.namespace)

    def engine_pid(self, model: str) -> int:
        """Returns the process that holds the model's memory, as the ledger has it."""
        report = self.scheduler.model(model)
        assert report is not None
        clients = self.device.usage().clients
        return next(c.pid for c in clients if c.name == report.engine_id)

    async def close(self) -> None:
        await self.stop_agent()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.scheduler.close()
        self.frontend.close()
        await self.queue.close()
        self.context.destroy(linger=0)


@contextlib.asynccontextmanager
async def world(config: ClusterConfig, timing: AgentTiming | None = None) -> AsyncIterator[World]:
    this = World(config, timing or AgentTiming())
    try:
        yield this
    finally:
        await this.close()
        path = kvcached.segment_path(DEVICE, config.namespace)
        assert not path.exists(), "the ledger's segment was left behind"


__all__ = ["DEVICE", "Drain", "FakeFrontend", "World", "make_config", "until", "world"]
