"""A cluster without engines: the real scheduler, Redis and sockets; scripted agents."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from prism.cluster.main import run
from prism.cluster.state.timing import SchedulerTiming
from prism.config.reload import reloaded
from prism.config.resolved import ConfigFile, write_resolved
from prism.config.schema.cluster_config import (
    ClusterConfig,
    DeviceConfig,
    EngineConfig,
    SchedulerConfig,
)
from prism.messages.agent import ActionResult
from prism.messages.cluster import ClusterStatus, FrontendState, OperatorCommand
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Request, Sampling
from prism.queueing.request_queue import RequestQueue
from prism.queueing.server import BundledRedis
from prism.scheduler.traffic import bucket
from tests.cluster.scripted import ScriptedAgent, eventually

MODEL_BYTES = 57344  # result of memory_need for `spec`: 40960 of weights, 16384 of KV
TIMING = SchedulerTiming(
    probe_after_s=0.4,
    lost_after_s=2.0,
    start_grace_s=2.0,
    activation_s=20.0,
    settle_s=2.0,
    retry_s=0.2,
    retry_max_s=0.5,
    queue_retry_s=0.05,
)


def spec(name: str, **more: Any) -> ModelSpec:
    defaults: dict[str, Any] = {
        "path": "/nowhere",
        "architecture": "Scripted",
        "dtype": "float32",
        "kv_dtype": "float32",
        "context_length": 100,
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 16,
        "weight_bytes": 40960,
        "token_bytes": 128,
        "slo_ttft_s": 1.0,
        "slo_tpot_s": 0.1,
    }
    return ModelSpec(name=name, **{**defaults, **more})


class Cluster:
    """Cluster of one test. `stop` ends all that is still running."""

    def __init__(self, url: str, namespace: str, directory: Path) -> None:
        self._url = url
        self._namespace = namespace
        self._directory = directory
        self._serial = count()
        self.agents: dict[str, ScriptedAgent] = {}
        self._scheduler: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._arrivals: dict[str, dict[int, int]] = {}
        self.queue = RequestQueue.connect(url, namespace)
        self.config_path = directory / "cluster.json"

    def configure(
        self, *models: ModelSpec, rooms: tuple[float, ...] = (2.0,), engines: int = 2, **more: Any
    ) -> ClusterConfig:
        """Writes the configuration. `rooms` is each device's capacity in models."""
        devices = [
            DeviceConfig(f"host:{i}", int(room * MODEL_BYTES) // 4096 * 4096, 4096, engines)
            for i, room in enumerate(rooms)
        ]
        # Devices are full here: models idle over the threshold would be evicted.
        settings = {"interval_s": 0.3, "idle_threshold_s": 60.0}
        settings |= more.pop("scheduler", {})
        self.config = ClusterConfig(
            namespace=self._namespace,
            run_dir=str(self._directory),
            redis_url=self._url,
            policy=more.pop("policy", "prism"),
            devices=devices,
            models=list(models),
            scheduler=SchedulerConfig(**settings),
            report_interval_s=0.1,
            engine=EngineConfig(
                adapter="fake",
                static_bytes=0,
                drain_timeout_s=1.0,
                weight_store=more.pop("weight_store", ""),
            ),
        )
        return self.config

    async def start(self, **agent: Any) -> None:
        """Starts the scheduler and an agent for every device. Returns when the cluster is ready."""
        self.start_scheduler()
        for device in self.config.devices:
            await self.start_agent(device.name, **agent)
        await eventually(self.ready)

    def start_scheduler(self) -> None:
        self._stop = asyncio.Event()
        write_resolved(self.config, self.config_path)
        file = ConfigFile(self.config_path, self.config)
        self._scheduler = asyncio.create_task(run(self.config, TIMING, self._stop, file=file))

    def reload(self, *models: ModelSpec) -> None:
        """Replaces the models, as `prism-serve reload` does."""
        loaded = msgspec.structs.replace(self.config, models=list(models), redis_url="")
        bundled = msgspec.structs.replace(self.config, redis_url=f"unix://{self.config.run_dir}/")
        leaving = [model.name for model in self.config.leaving]
        wanted = reloaded(bundled, loaded, leaving)
        self.config = msgspec.structs.replace(
            wanted, revision=self.config.revision + 1, redis_url=self.config.redis_url
        )
        write_resolved(self.config, self.config_path)

    async def stop_scheduler(self) -> None:
        if self._scheduler is not None:
            self._stop.set()
            scheduler, self._scheduler = self._scheduler, None
            await scheduler

    async def start_agent(self, device: str, **more: Any) -> ScriptedAgent:
        agent = ScriptedAgent(self.config, device, **more)
        await agent.start()
        self.agents[device] = agent
        return agent

    async def kill_agent(self, device: str) -> None:
        await self.agents.pop(device).kill()

    async def stop(self) -> None:
        await self.stop_scheduler()
        broken = [rule for agent in self.agents.values() for rule in agent.broken_rules]
        for device in list(self.agents):
            await self.kill_agent(device)
        await self.queue.close()
        assert not broken

    # --- what tests do and see --------------------------------------------------------------

    async def send(self, model: str, max_tokens: int = 1) -> str:
        request = self.request(model, max_tokens)
        tokens = max((agent.prompt_tokens for agent in self.agents.values()), default=3)
        await self.count_arrival(model, tokens)
        return await self.queue.enqueue(request)

    def request(self, model: str, max_tokens: int = 1) -> Request:
        return Request(
            id=f"r{next(self._serial)}",
            model=model,
            prompt_ids=[1, 2, 3],
            sampling=Sampling(max_tokens=max_tokens),
            arrival_unix_s=0.0,
            slo_ttft_s=1.0,
            slo_tpot_s=1.0,
            frontend_id="f0",
        )

    async def count_arrival(self, model: str, prompt_tokens: int = 3) -> None:
        """Sends the heartbeat of a frontend after an arrival. No reload waits for this frontend."""
        counts = self._arrivals.setdefault(model, {})
        number = bucket(prompt_tokens)
        counts[number] = counts.get(number, 0) + 1
        state = FrontendState(sys.maxsize, arrivals=self._arrivals)
        await self.queue.beat("tests", 60.0, state)

    async def serves(self, model: str, timeout_s: float = 30.0) -> None:
        """Sends a request and waits until an agent has served it."""
        before = self.finished(model)
        await self.send(model)
        await eventually(lambda: self.finished(model) > before, timeout_s)

    def finished(self, model: str) -> int:
        return sum(agent.finished[model] for agent in self.agents.values())

    def active(self) -> dict[str, set[str]]:
        return {device: agent.active() for device, agent in self.agents.items()}

    def orders(self) -> list[tuple[str, str]]:
        """Returns all agents' orders, in sequence for a cluster of one device."""
        return [order for agent in self.agents.values() for order in agent.orders]

    async def status(self) -> ClusterStatus:
        return await eventually(self.queue.status)

    async def refusal(self, model: str) -> str:
        """Waits until the model is refused. Returns the reason."""

        async def reason() -> str:
            return (await self.status()).refusals.get(model, "")

        return str(await eventually(reason))

    async def ready(self) -> bool:
        status = await self.queue.status()
        return status is not None and status.ready

    async def command(self, kind: str, **more: Any) -> ActionResult:
        """Sends a command as an operator's tool."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self.config.scheduler_endpoint)
            await socket.send(msgspec.msgpack.encode(OperatorCommand(kind=kind, **more)))
            frame = await asyncio.wait_for(socket.recv(), 30.0)
            return msgspec.msgpack.decode(frame, type=ActionResult)
        finally:
            socket.close()
            context.term()


@pytest.fixture
async def cluster(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> AsyncIterator[Cluster]:
    made = Cluster(redis_server.url, namespace, short_dir)
    try:
        yield made
    finally:
        await made.stop()
