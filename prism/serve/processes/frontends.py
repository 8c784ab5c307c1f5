"""Frontend processes, and the notifier that reports their ends to agents at once."""

from __future__ import annotations

import dataclasses
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import zmq

from prism.config.resolved import ConfigFile
from prism.config.schema.cluster_config import ClusterConfig
from prism.messages.requests import FrontendGone
from prism.process import Heartbeat
from prism.serve.node.run_dir import CONFIG_FILE
from prism.serve.processes.children import Child, ChildSpec
from prism.transport import BlockingChannel

LEAVE = signal.SIGUSR1  # tells a frontend that its successor serves


class AgentNotifier:
    """Sender of the launcher's messages to agents. An agent that is away gets them when it returns.

    Thread rule: the launcher's main thread.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._config, self._file = config, ConfigFile(Path(config.run_dir) / CONFIG_FILE, config)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channels: dict[str, BlockingChannel[None]] = {}  # by the agent's endpoint
        self._connect()

    def _connect(self) -> None:
        """Connects to the agents of the configuration, and disconnects others."""
        config = self._config = self._file.newer() or self._config
        wanted = {config.agent_cancel_endpoint(device.name) for device in config.devices}
        for endpoint in self._channels.keys() - wanted:
            self._channels.pop(endpoint).close()
        for endpoint in wanted - self._channels.keys():
            channel = BlockingChannel[None](self._context, zmq.PUSH, secret=config.cluster_key)
            self._channels[endpoint] = channel
            channel.connect(endpoint)

    def __enter__(self) -> AgentNotifier:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels.values():
            channel.close()
        self._context.term()

    def new_id_suffix(self) -> str:
        """Returns the part of a new frontend's id that leads to this machine from others. Empty if
        the cluster has one machine."""
        here = self._config.here
        if here is None:
            return ""
        port = next(filter(partial(_is_free, here.address), self._config.frontend_ports), 0)
        return f"@{here.name}:{port}:{secrets.token_hex(3)}"

    def serves(self, frontend_id: str) -> bool:
        """Returns True if the frontend has started and accepts output and connections."""
        return self._socket(frontend_id).exists()

    def _socket(self, frontend_id: str) -> Path:
        return Path(self._config.frontend_endpoint(frontend_id).removeprefix("ipc://"))

    def frontend_gone(self, frontend_id: str) -> None:
        """Reports the end of a frontend. Never blocks. An agent that misses the report notices the
        missing heartbeat seconds later."""
        self._connect()
        for channel in self._channels.values():
            with suppress(zmq.ZMQError):
                channel.send(FrontendGone(frontend_id), block=False)
        self._socket(frontend_id).unlink(missing_ok=True)


@dataclass(slots=True)
class LeavingFrontend:
    """A frontend whose successor was started."""

    process: subprocess.Popen[bytes]
    frontend_id: str
    until_s: float | None = None  # time at which it is killed; None: it still serves


class Frontend(Child):
    """Child process with a new frontend id for each start, so that requests of a dead process are
    not attributed to its successor.

    `slot` is the prefix of the ids.
    """

    def __init__(
        self,
        slot: str,
        spec: ChildSpec,
        logs: Path,
        variables: Mapping[str, str],
        notifier: AgentNotifier,
    ) -> None:
        super().__init__(dataclasses.replace(spec, name=f"frontend-{slot}"), logs, variables)
        self._slot = slot
        self._notifier = notifier
        self._starts = 0
        self._suffix = ""
        self._leaving: list[LeavingFrontend] = []

    @property
    def frontend_id(self) -> str:
        return f"{self._slot}.{self._starts}{self._suffix}"

    def start(self) -> None:
        self._starts += 1
        self._suffix = self._notifier.new_id_suffix()
        super().start()

    def arguments(self) -> Sequence[str]:
        return (*self.spec.arguments, "--frontend-id", self.frontend_id)

    def replace(self) -> None:
        """Starts a successor. When it serves, the old process accepts no more connections, finishes
        its requests and ends. Does nothing if the old process is dead, since it is restarted
        anyway. Raises OSError; then nothing changes."""
        old, beats = self._process, self._heartbeat
        if old is None or old.poll() is not None:
            return
        left, suffix = LeavingFrontend(old, self.frontend_id), self._suffix
        self._heartbeat = Heartbeat()
        try:
            self.start()
        except OSError:
            self._heartbeat = beats
            self._starts, self._suffix = self._starts - 1, suffix
            raise
        self._leaving.append(left)

    @property
    def is_starting_successor(self) -> bool:
        """True if a successor was started and does not serve yet."""
        return any(each.until_s is None for each in self._leaving)

    def watch(self) -> None:
        """Manages processes that leave. Call it a few times a second."""
        for each in list(self._leaving):
            if each.process.poll() is not None:
                self._leaving.remove(each)
                self._notifier.frontend_gone(each.frontend_id)
            elif each.until_s is None and self._notifier.serves(self.frontend_id):
                each.until_s = time.monotonic() + self.spec.drain_s
                each.process.send_signal(LEAVE)
            elif each.until_s is not None and time.monotonic() > each.until_s:
                each.process.kill()

    def running(self) -> bool:
        leaving = any(each.process.poll() is None for each in self._leaving)
        return leaving or super().running()

    def send(self, number: signal.Signals) -> None:
        for each in self._leaving:
            each.process.send_signal(number)
        super().send(number)

    def kill(self) -> None:
        for each in self._leaving:
            each.process.kill()
            each.process.wait()
        super().kill()

    def report_end(self) -> None:
        """Reports the end of the process to agents, which then end its requests."""
        self._notifier.frontend_gone(self.frontend_id)


def _is_free(address: str, port: int) -> bool:
    """Returns True if a port can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def replace_if_requested(
    request_file: Path, frontends: Sequence[Frontend], say: Callable[[str], None]
) -> None:
    """Replaces the frontends if an operator has made `request_file`. Call it a few times a
    second."""
    for each in frontends:
        each.watch()
    if not request_file.is_file() or any(each.is_starting_successor for each in frontends):
        return
    request_file.unlink(missing_ok=True)
    say("replacing frontends; the present ones finish their open requests")
    for each in frontends:
        try:
            each.replace()
        except OSError as error:
            say(f"{each.name} cannot be replaced: {error}")
