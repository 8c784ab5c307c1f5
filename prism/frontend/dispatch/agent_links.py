"""Sockets to the agents, for cancellations."""

from __future__ import annotations

import logging

import zmq
import zmq.asyncio

from prism.config.schema.cluster_config import ClusterConfig
from prism.messages.requests import Cancel
from prism.transport import Channel

log = logging.getLogger(__name__)

_CANCEL_BATCH_MAX = 1024


class AgentLinks:
    """Sockets to the agents, which `context` closes. For one event loop."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._context = context
        self._channels: dict[str, Channel[None]] = {}  # by the agent's endpoint

    def connect(self, config: ClusterConfig) -> None:
        """Connects to the agents of the configuration and disconnects from all others."""
        wanted = {config.agent_cancel_endpoint(device.name) for device in config.devices}
        for endpoint in self._channels.keys() - wanted:
            self._channels.pop(endpoint).close()
        for endpoint in wanted - self._channels.keys():
            channel = Channel[None](self._context, zmq.PUSH, secret=config.cluster_key)
            self._channels[endpoint] = channel
            channel.connect(endpoint)

    def cancel(self, request_ids: list[str]) -> None:
        """Tells all agents to stop these requests."""
        for start in range(0, len(request_ids), _CANCEL_BATCH_MAX):
            batch = request_ids[start : start + _CANCEL_BATCH_MAX]
            for channel in self._channels.values():
                try:
                    channel.send(Cancel(batch))
                except zmq.ZMQError as error:
                    log.debug("cannot send cancellations to an agent: %s", error)
