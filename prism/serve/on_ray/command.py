"""`prism-serve up --ray`: Ray runs a `prism-serve` on each of its machines.

Ray's processes end with its head, so what talks to Ray (`driver.py`) is a process of its own: when
it ends, the machines work on, and it is started again until it finds them. Among themselves they
are a cluster of several machines like any other.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from prism.config.reader import convert, read_mapping
from prism.config.schema import ServeYaml
from prism.curve import new_secret
from prism.errors import ConfigError, PrismError
from prism.process import child_environment
from prism.serve.children import EXIT_CONFIG
from prism.serve.on_ray.cluster_lease import KILL, STOP, ClusterLease
from prism.serve.on_ray.local_ray import local_ray
from prism.serve.on_ray.machines import (
    HOST,
    LaunchSpec,
    RayMachine,
    check_ray,
    layout,
    portable,
    usable,
)

EXIT_FAILED = 3
ERROR = "error: "
MACHINES = "@machines "  # no node's name: the nodes that all follow from now on
_DRIVER = (sys.executable, "-P", "-m", "prism.serve.on_ray.driver")
_POLL_S = 0.2
_ANSWER_S = 5.0
_CONNECT_S = 120.0
_SILENT_S = 120.0  # more than Ray is given for an answer of each of some machines
_AGAIN_S = 3.0
_STOP_S = 150.0  # more than the driver gives its machines
_QUIET_S = 5.0  # for a node to be there that has just begun
_DRIVER_S = 20.0  # for the driver to see that all have ended, if Ray has not gone at this moment


class NodeFailedError(PrismError):
    """A node's `prism-serve` has ended before the cluster was ready."""


def ray_of(path: Path) -> str | None:
    """The address of the Ray that starts the file's machines, if one does. A file with a mistake is
    for its reader to refuse."""
    try:
        found = read_mapping(path).get("ray")
    except ConfigError:
        return None
    return None if found is None else str(found)


def serve(
    path: Path, address: str, options: Mapping[str, object], say: Callable[[str], None]
) -> None:
    """Until a signal; then nothing is left on any machine. `address`: "auto" for the Ray cluster of
    this machine, or one that is started here where there is none; or its HOST:PORT. `options`: of
    each node's `prism-serve`, with their values; None: not given.

    Raises ConfigError (nothing was left running) or NodeFailedError. Main thread only.
    """
    check_ray()
    with caught_signals() as asked, ExitStack() as stack:
        try:
            file = read_mapping(path)
            redis_url = _redis_of(convert(file, ServeYaml))
            words = [w for n, v in options.items() if v is not None for w in (n, str(v))]
            address, machines = _found(address, file, stack, say)
            spec = _launch_spec(portable(file, path.resolve().parent), address, machines, words)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        lease = ClusterLease(redis_url, spec.key)
        try:
            DriverSupervisor(spec, lease, say).run(asked)
        finally:
            lease.close()


def _redis_of(data: ServeYaml) -> str:
    if data.redis is None:
        raise ConfigError("redis: several machines need one that all reach; give its URL")
    return data.redis


def _found(
    address: str, file: Mapping[str, Any], stack: ExitStack, say: Callable[[str], None]
) -> tuple[str, list[RayMachine]]:
    """Ray's address, and its machines that live. Where there is none, one runs here until `stack`
    is closed. Raises ConfigError."""
    if machines := _machines(address):
        return address, machines
    if file.get("nodes"):
        raise ConfigError(
            "ray: no Ray cluster was found, and the nodes are machines of one: start it with"
            " ray start --head here and ray start --address=... on the others, or name HOST:PORT"
        )
    wants_host = any(each["name"] == HOST for each in file.get("devices", []))
    address = stack.enter_context(local_ray(int(wants_host)))
    say(f"no Ray cluster was found: one was started at {address}, for this command alone")
    return address, _machines(address)


def _launch_spec(
    file: str, address: str, machines: Sequence[RayMachine], options: Sequence[str]
) -> LaunchSpec:
    """Raises ConfigError."""
    layout(file, machines)
    nodes = usable(file, machines)
    kept = list(machines) if nodes is None else nodes
    return LaunchSpec(address, file, new_secret(), kept, tuple(options))


def _machines(address: str) -> list[RayMachine]:
    """Those of Ray that live; none: there is no Ray, which may only be with auto. Raises
    ConfigError."""
    _check_listens(address)
    try:
        done = subprocess.run(
            [*_DRIVER, address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            start_new_session=True,
            timeout=_CONNECT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"ray: {address} did not answer in {_CONNECT_S:g} s; see ray status"
        ) from error
    last = done.stdout.decode(errors="replace").rstrip().rpartition("\n")[2]
    if done.returncode:
        raise ConfigError(last.removeprefix(ERROR) or f"ray: its driver ended: {done.returncode}")
    return msgspec.json.decode(last, type=list[RayMachine])


def _check_listens(address: str) -> None:
    """Ray itself tries for minutes. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"ray: no Ray cluster answers at {address}: {error}; start one with ray start --head,"
            " or correct the address"
        ) from error


class DriverSupervisor:
    """Runs the process that talks to Ray, again and again until a signal comes."""

    def __init__(self, spec: LaunchSpec, lease: ClusterLease, say: Callable[[str], None]) -> None:
        self._spec, self._lease, self._say = spec, lease, say
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._last, self._heard_s = "", 0.0  # the last line of the process, and when one came
        self._settled = self._away = False

    def run(self, asked: Sequence[int]) -> None:
        """Until a signal comes or the lease is over. Raises ConfigError or NodeFailedError."""
        start_at_s = 0.0
        try:
            while not asked and not self._lease.is_over():
                now_s = time.monotonic()
                if self._process is None and now_s >= start_at_s:
                    self._start()
                elif self._process is not None and (code := self._process.poll()) is not None:
                    self._ended(code)
                    start_at_s = now_s + _AGAIN_S
                elif self._process is not None and now_s - self._heard_s > _SILENT_S:
                    self._process.kill()
                time.sleep(_POLL_S)
        finally:
            self._stop(asked)

    def _start(self) -> None:
        self._process = process = subprocess.Popen(
            _DRIVER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            start_new_session=True,
        )
        assert process.stdin is not None
        spec = msgspec.structs.replace(self._spec, settled=self._settled)
        with process.stdin as to:
            to.write(msgspec.json.encode(spec))
        self._last, self._heard_s = "", time.monotonic()
        self._reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, lines: IO[bytes]) -> None:
        """An empty line says that Ray is there, and that the process does not hang."""
        with lines:
            for line in lines:
                self._heard_s = time.monotonic()
                if not (text := line.decode(errors="replace").rstrip("\n")):
                    if self._away:
                        self._say("Ray is there again")
                    self._away = False
                    continue
                if text.startswith(MACHINES):
                    self._keep_machines(text.removeprefix(MACHINES))
                    continue
                self._last = text
                if not text.startswith(ERROR):
                    self._settled |= ": ready in " in text
                    self._say(text)

    def _keep_machines(self, text: str) -> None:
        """For the next process."""
        machines = msgspec.json.decode(text, type=list[RayMachine])
        self._spec = msgspec.structs.replace(self._spec, machines=machines)

    def _ended(self, code: int) -> None:
        assert self._reader is not None
        self._reader.join()
        self._process, why = None, self._last.removeprefix(ERROR)
        if not self._settled:
            raise (ConfigError if code == EXIT_CONFIG else NodeFailedError)(why or f"exit {code}")
        if not self._away:
            self._say(f"Ray is lost ({why}); the machines work on, and it is looked for again")
        self._away = True

    # --- the end ----------------------------------------------------------------------------

    def _stop(self, asked: Sequence[int]) -> None:
        """By Ray, and by Redis where Ray is away. Another signal ends all at once."""
        until_s, sent, quiet_s = time.monotonic() + _STOP_S, 0, time.monotonic()
        while time.monotonic() < until_s:
            if sent < max(1, len(asked)):
                sent += 1
                self._tell(KILL if sent > 1 else STOP)
            if self._process is not None and self._process.poll() is not None:
                self._process = None
            left = self._lease.nodes_left()
            if left or (left is None and self._process is not None):
                quiet_s = time.monotonic()
            elif time.monotonic() - quiet_s > self._patience_s():
                if self._process is not None:
                    self._process.kill()
                return
            time.sleep(_POLL_S)
        self._say("not all machines ended in time")

    def _patience_s(self) -> float:
        """How long there must have been no node, for none to come."""
        if self._process is not None:
            return _DRIVER_S
        return _QUIET_S if self._away else 0.0

    def _tell(self, value: bytes) -> None:
        """The machines, by Redis, or by Ray where Redis is away."""
        by_redis = self._lease.set(value)
        if self._process is None:
            return
        if self._away:
            self._process.kill()  # it looks for Ray, and knows no machine
        elif self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM if by_redis else signal.SIGINT)


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Those that asked for the end, within the block."""
    asked: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {n: signal.signal(n, lambda number, _frame: asked.append(number)) for n in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
