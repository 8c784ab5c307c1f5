"""The frontends' processes, and how agents hear at once that one of them has ended."""

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
from prism.config.schema import ClusterConfig
from prism.messages.requests import FrontendGone
from prism.process import Heartbeat
from prism.serve.children import Child, ChildSpec
from prism.serve.run_dir import CONFIG_FILE
from prism.transport import BlockingChannel

LEAVE = signal.SIGUSR1  # to a frontend: a successor has come


class AgentLine:
    """What the launcher says to agents. An agent that is away hears it when it is back. Thread
    rule: the launcher's main thread."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config, self._file = config, ConfigFile(Path(config.run_dir) / CONFIG_FILE, config)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channels: dict[str, BlockingChannel[None]] = {}  # by the agent's endpoint
        self._connect()

    def _connect(self) -> None:
        """To the agents of the configuration, and to no others."""
        config = self._config = self._file.newer() or self._config
        wanted = {config.agent_cancel_endpoint(device.name) for device in config.devices}
        for endpoint in self._channels.keys() - wanted:
            self._channels.pop(endpoint).close()
        for endpoint in wanted - self._channels.keys():
            channel = BlockingChannel[None](self._context, zmq.PUSH, secret=config.cluster_key)
            self._channels[endpoint] = channel
            channel.connect(endpoint)

    def __enter__(self) -> AgentLine:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels.values():
            channel.close()
        self._context.term()

    def new_place(self) -> str:
        """What makes the id of a frontend that starts now lead to this machine, from others; ""
        where there are none."""
        here = self._config.here
        if here is None:
            return ""
        port = next(filter(partial(_is_free, here.address), self._config.frontend_ports), 0)
        return f"@{here.name}:{port}:{secrets.token_hex(3)}"

    def serves(self, frontend_id: str) -> bool:
        """It has read all it needs, and takes output and connections."""
        return self._socket(frontend_id).exists()

    def _socket(self, frontend_id: str) -> Path:
        return Path(self._config.frontend_endpoint(frontend_id).removeprefix("ipc://"))

    def frontend_gone(self, frontend_id: str) -> None:
        """Never blocks. One that does not hear it notices the missing heartbeat, seconds later."""
        self._connect()
        for channel in self._channels.values():
            with suppress(zmq.ZMQError):
                channel.send(FrontendGone(frontend_id), block=False)
        self._socket(frontend_id).unlink(missing_ok=True)


@dataclass(slots=True)
class Leaving:
    """A frontend whose successor was started."""

    process: subprocess.Popen[bytes]
    frontend_id: str
    until_s: float | None = None  # it was told to leave; then it is killed


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
        super().__init__(dataclasses.replace(spec, name=f"frontend-{slot}"), logs, variables)
        self._slot = slot
        self._line = line
        self._starts = 0
        self._place = ""
        self._leaving: list[Leaving] = []

    @property
    def frontend_id(self) -> str:
        return f"{self._slot}.{self._starts}{self._place}"

    def start(self) -> None:
        self._starts += 1
        self._place = self._line.new_place()
        super().start()

    def arguments(self) -> Sequence[str]:
        return (*self.spec.arguments, "--frontend-id", self.frontend_id)

    def replace(self) -> None:
        """Start another process; once that serves, this one takes no more connections, finishes
        what is open and ends. A dead one is started again anyway. Raises OSError; then nothing
        changes."""
        old, beats = self._process, self._heartbeat
        if old is None or old.poll() is not None:
            return
        left, place = Leaving(old, self.frontend_id), self._place
        self._heartbeat = Heartbeat()
        try:
            self.start()
        except OSError:
            self._heartbeat = beats
            self._starts, self._place = self._starts - 1, place
            raise
        self._leaving.append(left)

    @property
    def is_replaced(self) -> bool:
        """A successor was started and does not answer yet."""
        return any(each.until_s is None for each in self._leaving)

    def watch(self) -> None:
        """Call a few times a second."""
        for each in list(self._leaving):
            if each.process.poll() is not None:
                self._leaving.remove(each)
                self._line.frontend_gone(each.frontend_id)
            elif each.until_s is None and self._line.serves(self.frontend_id):
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

    def bury(self) -> None:
        """Its process has ended: agents end what it had asked for."""
        self._line.frontend_gone(self.frontend_id)


def _is_free(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def replace_if_asked(
    asked: Path, frontends: Sequence[Frontend], say: Callable[[str], None]
) -> None:
    """An operator made the file `asked`. Call a few times a second."""
    for each in frontends:
        each.watch()
    if not asked.is_file() or any(each.is_replaced for each in frontends):
        return
    asked.unlink(missing_ok=True)
    say("frontends are replaced; the present ones finish what is open")
    for each in frontends:
        try:
            each.replace()
        except OSError as error:
            say(f"{each.name} cannot be replaced now: {error}")
