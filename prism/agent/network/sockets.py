"""Sockets of the agent to engines, the cluster scheduler, frontends and other machines' agents."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from msgspec import structs

from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.endpoints import node_of
from prism.messages.agent import ActionResult, AgentCommand, AgentReport, FromScheduler
from prism.messages.engine import FromEngine, ToEngine
from prism.messages.kv import KvPart, KvTaken
from prism.messages.requests import (
    FRONTEND_SILENT,
    Chunk,
    EngineOutput,
    Failure,
    Request,
    Started,
)
from prism.transport import ENGINE_MESSAGE_BYTES_MAX, BlockingChannel, Channel

log = logging.getLogger(__name__)

REPORTS_HIGH_WATER = 100
OUTPUT_HIGH_WATER = 10_000
LINGER_MS = 1000
MEASURED_BYTES_MIN = 16 << 20
MEASURED_S = 600.0  # validity of a measured network rate


def remove_files(endpoints: Sequence[str]) -> None:
    """Removes the files of ipc sockets, which libzmq does not."""
    for endpoint in endpoints:
        Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


class EngineLink:
    """ROUTER to which engines connect with their id as identity. For one event loop."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        # Mandatory: a send to an engine that is not connected, or whose queue is full, fails.
        options: dict[str, Any] = {
            "router_mandatory": 1,
            "router_handover": 1,
            "maxmsgsize": ENGINE_MESSAGE_BYTES_MAX,
        }
        self._channel = Channel[FromEngine](context, zmq.ROUTER, FromEngine, **options)
        self._endpoint = endpoint

    def bind(self) -> None:
        """Binds the address, taking it from a predecessor if necessary."""
        self._channel.bind(self._endpoint)

    def send(self, engine_id: str, message: ToEngine) -> bool:
        """Sends a message without blocking.

        Returns False if the engine is gone or hangs, which other parts detect.
        """
        try:
            self._channel.send(message, to=engine_id.encode())
        except zmq.ZMQError as error:
            log.warning("cannot send %s to %s: %s", type(message).__name__, engine_id, error)
            return False
        return True

    async def receive(self) -> tuple[str, FromEngine]:
        """Returns the sender of the next message, and the message."""
        identity, message = await self._channel.receive()
        return identity.decode(errors="replace"), message

    def close(self) -> None:
        self._channel.close()


class SchedulerLink:
    """DEALER whose identity is the device's name.

    It connects to all places where the scheduler may run, and reconnects by itself. Messages are
    dropped while no scheduler is connected: the next report has the same facts.
    """

    def __init__(self, context: zmq.asyncio.Context, config: ClusterConfig, device: str) -> None:
        self._channel = Channel[FromScheduler](
            context,
            zmq.DEALER,
            FromScheduler,
            config.cluster_key,
            identity=device.encode(),
            linger=200,
            immediate=1,
            sndhwm=REPORTS_HIGH_WATER,
        )
        self._endpoints: set[str] = set()
        self.connect(config)

    def connect(self, config: ClusterConfig) -> None:
        """Connects to the configuration's new places of the scheduler.

        Old places stay connected, which costs nothing if no process answers there.
        """
        for endpoint in set(config.scheduler_endpoints) - self._endpoints:
            self._channel.connect(endpoint)
            self._endpoints.add(endpoint)

    def send(self, message: AgentReport | ActionResult) -> bool:
        """Sends a message without blocking. Returns False if no scheduler is connected."""
        try:
            self._channel.send(message)
        except zmq.ZMQError:
            return False
        return True

    async def receive(self) -> AgentCommand:
        """Returns the next command."""
        while True:
            _, message = await self._channel.receive()
            if not isinstance(message, ActionResult):
                return message

    def close(self) -> None:
        self._channel.close()


class OutputBatch:
    """Output of one event, grouped by frontend."""

    def __init__(self) -> None:
        self.outputs: dict[str, EngineOutput] = {}  # by the frontend's id

    def chunk(self, request: Request, chunk: Chunk) -> None:
        self.output(request.frontend_id).chunks.append(chunk)

    def started(self, request: Request, started: Started) -> None:
        self.output(request.frontend_id).started.append(started)

    def failure(self, request: Request, failure: Failure) -> None:
        self.output(request.frontend_id).failures.append(failure)

    def output(self, frontend_id: str) -> EngineOutput:
        """Returns the output for this frontend."""
        output = self.outputs.get(frontend_id)
        if output is None:
            output = EngineOutput(chunks=[], failures=[], started=[])
            self.outputs[frontend_id] = output
        return output


def retryable(request: Request, code: str, message: str) -> Failure:
    return Failure(request.id, request.attempt, code, message, retryable=True)


def silent_frontend(request: Request) -> Failure:
    why = "the frontend was suspended or cut off for seconds, and the request was stopped meanwhile"
    return retryable(request, FRONTEND_SILENT, why)


class TokenSender:
    """PUSH socket for each frontend, opened at its first output. Never blocks.

    A frontend with OUTPUT_HIGH_WATER unread messages counts as dead.

    Args:
        endpoint_of: returns the address of a frontend's id, or raises ValueError if the id is not
            valid. Addresses never come from requests, which could name a foreign process.
        on_dead: called with the id of a frontend that is dead or has no valid id.
        secret: the cluster's key.
        agent: name of this process in its output.
    """

    def __init__(
        self,
        endpoint_of: Callable[[str], str],
        on_dead: Callable[[str], None],
        secret: str = "",
        agent: str = "",
    ) -> None:
        self._secret, self._agent = secret, agent
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoint_of = endpoint_of
        self._on_dead = on_dead
        self._channels: dict[str, BlockingChannel[None]] = {}

    def send(self, batch: OutputBatch) -> None:
        for frontend_id, output in batch.outputs.items():
            try:
                channel = self._channels.get(frontend_id) or self._open(frontend_id)
                channel.send(structs.replace(output, agent=self._agent), block=False)
            except (zmq.ZMQError, ValueError) as error:
                log.warning("cannot send output to frontend %.100r: %s", frontend_id, error)
                self.drop(frontend_id)
                self._on_dead(frontend_id)

    def drop(self, frontend_id: str) -> None:
        """Closes the frontend's socket. Messages that it does not read in LINGER_MS are lost."""
        if (channel := self._channels.pop(frontend_id, None)) is not None:
            channel.close(LINGER_MS)

    def frontends(self) -> set[str]:
        return set(self._channels)

    def close(self) -> None:
        """Closes all sockets after at most LINGER_MS for messages that were sent."""
        for channel in self._channels.values():
            channel.close(LINGER_MS)
        self._channels.clear()
        self._context.term()

    def _open(self, frontend_id: str) -> BlockingChannel[None]:
        endpoint = self.endpoint_of(frontend_id)
        channel = BlockingChannel[None](
            self._context, zmq.PUSH, secret=self._secret, sndhwm=OUTPUT_HIGH_WATER
        )
        self._channels[frontend_id] = channel
        channel.connect(endpoint)
        return channel


class PeerLinks:
    """PUSH socket for each agent of another machine, opened at the first message to it.

    The sockets have their own context, so that large parts are encrypted in a separate thread from
    engines' messages.
    """

    def __init__(self, config: ClusterConfig, now_s: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        """Configuration with the agents' addresses. A reload sets a new one."""
        self._now_s = now_s
        self._measured: dict[str, tuple[float, float]] = {}  # node -> (bytes per second, time)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channels: dict[str, BlockingChannel[None]] = {}

    def send(self, device: str, message: KvPart | KvTaken) -> None:
        """Sends a message without blocking.

        Raises ConnectionError if `device` is not on another machine, or its agent reads nothing.
        """
        try:
            channel = self._channels.get(device) or self._open(device)
            channel.send(message, block=False)
        except (zmq.ZMQError, ValueError) as error:
            raise ConnectionError(f"cannot reach the agent of {device!r:.100}: {error}") from error

    def knows(self, device: str) -> bool:
        """Returns whether `device` is on another machine of the cluster."""
        names = {each.name for each in self.config.devices}
        return device in names and node_of(device) != self.config.node

    def network_bytes_s(self, device: str) -> float:
        """Returns the network rate to the device's machine.

        It is the configured rate, or the measured one if that is lower and at most MEASURED_S old.
        Raises ConnectionError if `device` is not on another machine.
        """
        if not self.knows(device):
            raise ConnectionError(f"{device!r:.100} is not on another machine of the cluster")
        configured = self.config.links_bytes_s()[node_of(device)]
        bytes_s, measured_s = self._measured.get(node_of(device), (configured, 0.0))
        return min(configured, bytes_s) if self._now_s() - measured_s < MEASURED_S else configured

    def measured(self, device: str, size_bytes: int, seconds: float) -> None:
        """Records a transfer to the device's machine. Small transfers are ignored."""
        if size_bytes >= MEASURED_BYTES_MIN:
            self._measured[node_of(device)] = (size_bytes / seconds, self._now_s())

    def drop(self, device: str) -> None:
        """Closes the socket to a device's agent and drops messages that it has not read."""
        if (channel := self._channels.pop(device, None)) is not None:
            channel.close(0)

    def close(self) -> None:
        for device in list(self._channels):
            self.drop(device)
        self._context.term()

    def _open(self, device: str) -> BlockingChannel[None]:
        if not self.knows(device):
            raise ValueError("it is not on another machine of the cluster")
        endpoint = self.config.agent_cancel_endpoint(device)
        channel = BlockingChannel[None](self._context, zmq.PUSH, secret=self.config.cluster_key)
        self._channels[device] = channel
        channel.connect(endpoint)
        return channel
