"""The frontends' processes, and how agents hear at once that one of them has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import zmq

from prism.config.schema import ClusterConfig
from prism.messages.requests import FrontendGone
from prism.serve.children import Child, ChildSpec
from prism.transport import BlockingChannel


class AgentLine:
    """What the launcher says to agents. An agent that is away hears it when it is back. Thread
    rule: the launcher's main thread."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channels = [BlockingChannel[None](self._context, zmq.PUSH) for _ in config.devices]
        for channel, device in zip(self._channels, config.devices, strict=True):
            channel.connect(config.agent_cancel_endpoint(device.name))

    def __enter__(self) -> AgentLine:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels:
            channel.close()
        self._context.term()

    def frontend_gone(self, frontend_id: str) -> None:
        """Never blocks. One that does not hear it notices the missing heartbeat, seconds later."""
        for channel in self._channels:
            with suppress(zmq.ZMQError):
                channel.send(FrontendGone(frontend_id), block=False)
        endpoint = self._config.frontend_endpoint(frontend_id)
        Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


class Frontend(Child):
    """Each process has an id of its own: what a dead one left is not taken for its successor's.

    `slot` is the beginning of the ids.
    """

    def __init__(
        self,
        slot: str,
        spec: ChildSpec,
        logs: Path,
        variables: Mapping[str, str],
        line: AgentLine,
    ) -> None:
        super().__init__(replace(spec, name=f"frontend-{slot}"), logs, variables)
        self._slot = slot
        self._line = line
        self._starts = 0

    @property
    def frontend_id(self) -> str:
        return f"{self._slot}.{self._starts}"

    def start(self) -> None:
        self._starts += 1
        super().start()

    def arguments(self) -> Sequence[str]:
        return (*self.spec.arguments, "--frontend-id", self.frontend_id)

    def bury(self) -> None:
        """Its process has ended: agents end what it had asked for."""
        self._line.frontend_gone(self.frontend_id)
