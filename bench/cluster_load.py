"""Load of the cluster scheduler and Redis with many agents and models.

Real are the scheduler's process with its policy, Redis, ZeroMQ (TCP with CURVE, except on the first
machine), and the messages of agents (`stub_agents.py`). Requests choose models by Zipf's law, so
rare models are activated and others evicted all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory

import psutil
import redis
import zmq
import zmq.asyncio
from stub_agents import Found, stubs

from prism.config.resolved import write_resolved
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig, EngineConfig
from prism.config.schema.endpoints import NodeConfig, on_node
from prism.curve import new_secret
from prism.messages.agent import (
    ActionResult,
)
from prism.messages.cluster import OperatorCommand
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Request, Sampling
from prism.queueing.request_queue import RequestQueue
from prism.queueing.server import BundledRedis
from prism.transport import Channel

GIB = 1 << 30
PER_NODE = 8
STAGES = ("engine", "shrink", "map", "weights", "kv", "graphs", "total")
FLUSH_EVERY_S = 0.05


def configuration(folder: Path, redis_url: str, options: argparse.Namespace) -> ClusterConfig:
    """Returns machines of eight devices, on which about three fifths of the models fit."""
    count = -(-options.agents // PER_NODE)
    nodes = [NodeConfig(f"n{i}", "127.0.0.1", _free_port(), 1, PER_NODE) for i in range(count)]
    engines = max(2, -(-options.models * 3 // (5 * options.agents)))
    devices = [
        DeviceConfig(
            on_node(f"host:{i % PER_NODE}", f"n{i // PER_NODE}"), 70 * GIB, 2 << 20, engines
        )
        for i in range(options.agents)
    ]
    return ClusterConfig(
        namespace=f"prism-load-{_free_port()}",
        run_dir=str(folder),
        redis_url=redis_url,
        policy=options.policy,
        devices=devices,
        models=[_model(f"m{i}", 50 * GIB // engines) for i in range(options.models)],
        engine=EngineConfig(adapter="fake", static_bytes=0, weight_store=""),
        report_interval_s=options.report_ms / 1000,
        nodes=nodes,
        node="n0",
        cluster_key=new_secret(),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _names(nodes: Sequence[NodeConfig]) -> Iterator[str]:
    return (on_node(f"host:{i}", node.name) for node in nodes for i in range(node.devices))


def _model(name: str, weight_bytes: int) -> ModelSpec:
    return ModelSpec(
        name=name,
        path="/nowhere",
        architecture="Stub",
        dtype="bfloat16",
        kv_dtype="bfloat16",
        context_length=8192,
        num_layers=32,
        num_kv_heads=8,
        head_dim=128,
        weight_bytes=weight_bytes,
        token_bytes=1 << 17,
        slo_ttft_s=5.0,
        slo_tpot_s=0.1,
    )


async def drive(config: ClusterConfig, options: argparse.Namespace) -> tuple[list[float], int]:
    """Sends requests and flushes. Returns the seconds of each flush, from the command to its answer
    from an agent, and the number of requests.
    """
    queue = RequestQueue.connect(config.redis_url, config.namespace)
    asking = asyncio.create_task(_flush(config))
    weights = [1 / (rank + 1) for rank in range(len(config.models))]
    end_s, sent, rng = time.monotonic() + options.seconds, 0, random.Random(options.seed)
    while time.monotonic() < end_s and not asking.done():
        model = rng.choices(config.models, weights)[0].name
        await queue.enqueue(_request(f"r{sent}", model))
        sent += 1
        await asyncio.sleep(rng.expovariate(options.rate))
    if asking.done():
        asking.result()
    asking.cancel()
    taken_s = (await asyncio.gather(asking))[0]
    await queue.close()
    return taken_s, sent


def _request(request_id: str, model: str) -> Request:
    sampling, now_s = Sampling(max_tokens=100), time.time()
    return Request(request_id, model, [1] * 100, sampling, now_s, 5.0, 0.1, "f0")


async def _flush(config: ClusterConfig) -> list[float]:
    """Sends flushes until it is cancelled. Returns the seconds of each."""
    context, taken_s = zmq.asyncio.Context(), list[float]()
    channel = Channel[ActionResult](context, zmq.DEALER, ActionResult)
    channel.connect(config.scheduler_endpoint)
    try:
        for device in cycle([device.name for device in config.devices]):
            begin_s = time.monotonic()
            channel.send(OperatorCommand("flush", device=device))
            await channel.receive()
            taken_s.append(time.monotonic() - begin_s)
            await asyncio.sleep(FLUSH_EVERY_S)
    except asyncio.CancelledError:
        pass
    finally:
        channel.close()
    return taken_s


@contextmanager
def scheduler(config_path: Path, log: Path) -> Iterator[psutil.Process]:
    with log.open("wb") as out:
        command = [sys.executable, "-m", "prism.cluster", "--config", str(config_path)]
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        yield psutil.Process(process.pid)
        assert process.poll() is None, log.read_text()[-2000:]
    finally:
        process.terminate()
        process.wait()


class Meter:
    """CPU seconds of a process since the meter was created."""

    def __init__(self, process: psutil.Process) -> None:
        self._process, self._before_s = process, 0.0
        self._before_s = self.cpu_s()

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system - self._before_s

    @property
    def resident_mib(self) -> float:
        return float(self._process.memory_info().rss) / (1 << 20)


def measure(
    folder: Path, database: BundledRedis, options: argparse.Namespace
) -> dict[str, float | list[float]]:
    config, path = configuration(folder, database.url, options), folder / "cluster.json"
    write_resolved(config, path)
    names = [device.name for device in config.devices]
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(options.processes, mp_context=spawn))
        leading = stack.enter_context(scheduler(path, folder / "scheduler.log"))
        parts = [names[i :: options.processes] for i in range(options.processes)]
        begin_unix_s = time.time() + options.start_s
        times_s = options.action_ms / 1000, begin_unix_s, options.seconds
        futures = [pool.submit(stubs, path, part, *times_s) for part in parts]
        client = stack.enter_context(redis.Redis.from_url(database.url))
        _await_start(config, client, futures, begin_unix_s)
        meters = Meter(leading), Meter(psutil.Process(database.pid))
        commands = int(client.info("stats")["total_commands_processed"])
        flush_s, sent = asyncio.run(drive(config, options))
        cpu_s = [meter.cpu_s() for meter in meters]
        commands = int(client.info("stats")["total_commands_processed"]) - commands
        resident = [meter.resident_mib for meter in meters]
        found = [future.result() for future in futures]
    seconds = options.seconds
    counts = sum((part.counts for part in found), Counter[str]())
    return {
        "requests sent, served a second": [sent / seconds, counts["served"] / seconds],
        "reports a second": counts["reports"] / seconds,
        "activations, evictions a second": [counts[k] / seconds for k in ("activated", "evicted")],
        "cores of the scheduler, Redis": [each / seconds for each in cpu_s],
        "MiB of the scheduler, Redis": resident,
        "cores of the stubs": sum(part.cpu_s for part in found) / seconds,
        "Redis commands a second": commands / seconds,
        "an action beyond what the agent takes, p50 p99 ms": _shares(flush_s),
        "a request for an inactive model, beyond the activation, p50 p99 ms": _shares(
            [each for part in found for each in part.cold_s]
        ),
    }


def _await_start(
    config: ClusterConfig,
    client: redis.Redis,
    futures: Sequence[Future[Found]],
    begin_unix_s: float,
) -> None:
    """Waits until the stubs start to count. Prints when all models that fit were active."""
    begun_s, last, at_s = time.monotonic(), 0, 0.0
    while time.time() < begin_unix_s:
        time.sleep(0.5)
        for future in futures:
            if future.done():
                future.result()
        placed = int(client.hlen(f"{config.namespace}:placement"))
        if placed > last:
            last, at_s = placed, time.monotonic() - begun_s
    print(f"{last} models were active {at_s:.1f} s after the start")


def _shares(seconds: Sequence[float]) -> list[float]:
    cuts = quantiles(seconds, n=100) if len(seconds) > 1 else [float("nan")] * 99
    return [cuts[49] * 1000, cuts[98] * 1000]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--models", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--report-ms", type=int, default=500, help="between an agent's reports")
    parser.add_argument("--action-ms", type=int, default=1000, help="duration of an activation")
    parser.add_argument("--policy", default="prism")
    parser.add_argument("--start-s", type=float, default=90.0, help="time before the measurement")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=2, help="processes of stub agents")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with TemporaryDirectory(prefix="prism-") as folder, BundledRedis(Path(folder)) as database:
        for name, value in measure(Path(folder), database, options).items():
            values = value if isinstance(value, list) else [value]
            print(f"{name:66}", *(f"{each:10.2f}" for each in values))


if __name__ == "__main__":
    main()
