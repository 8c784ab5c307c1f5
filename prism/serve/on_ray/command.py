"""`prism-serve up --ray`: Ray runs a `prism-serve` on each of its machines.

Ray's processes end with its head, so a separate process (`driver.py`) talks to Ray. When it ends,
the machines keep working, and it is restarted until it finds them. The machines form a cluster of
several machines like any other.
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
from prism.config.schema.cluster_config import ServeYaml
from prism.curve import new_secret
from prism.errors import ConfigError, PrismError
from prism.process import child_environment
from prism.serve.on_ray.cluster_lease import KILL, STOP, ClusterLease
from prism.serve.on_ray.local_ray import local_ray
from prism.serve.on_ray.ray_machines import (
    HOST,
    LaunchSpec,
    RayMachine,
    check_ray,
    layout,
    machines_with_devices,
    with_absolute_paths,
)
from prism.serve.processes.children import EXIT_CONFIG

EXIT_FAILED = 3
ERROR = "error: "
MACHINES = "@machines "  # prefix of the line with the present nodes; not a valid node name
_DRIVER = (sys.executable, "-P", "-m", "prism.serve.on_ray.driver")
_POLL_S = 0.2
_ANSWER_S = 5.0
_CONNECT_S = 120.0
_SILENT_S = 120.0  # exceeds the timeout of Ray's answers for several machines
_RETRY_S = 3.0
_STOP_S = 150.0  # exceeds the driver's timeout
_QUIET_S = 5.0  # time in which a node that has just started registers
_DRIVER_S = 20.0  # time in which the driver sees that all nodes have ended


class NodeFailedError(PrismError):
    """A node's `prism-serve` ended before the cluster was ready."""


def ray_address(path: Path) -> str | None:
    """Returns the address of the Ray that starts the file's machines, or None. Ignores mistakes in
    the file, which its reader reports."""
    try:
        found = read_mapping(path).get("ray")
    except ConfigError:
        return None
    return None if found is None else str(found)


def serve(
    path: Path, address: str, options: Mapping[str, object], say: Callable[[str], None]
) -> None:
    """Serves until a signal, and then ends everything on all machines.

    Raises ConfigError (nothing was left running) or NodeFailedError. Main thread only.

    Args:
        path: The YAML.
        address: HOST:PORT of a Ray cluster, or "auto" for the one of this machine, which is
            started if there is none.
        options: Options and values for each node's `prism-serve`. None: not given.
        say: Prints a line.
    """
    check_ray()
    with caught_signals() as signals, ExitStack() as stack:
        try:
            file = read_mapping(path)
            redis_url = _redis_of(convert(file, ServeYaml))
            words = [w for n, v in options.items() if v is not None for w in (n, str(v))]
            address, machines = _find_ray(address, file, stack, say)
            spec = _launch_spec(
                with_absolute_paths(file, path.resolve().parent), address, machines, words
            )
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        lease = ClusterLease(redis_url, spec.key)
        try:
            DriverSupervisor(spec, lease, say).run(signals)
        finally:
            lease.close()


def _redis_of(data: ServeYaml) -> str:
    if data.redis is None:
        raise ConfigError("redis: is required with Ray; give the URL of a server for all machines")
    return data.redis


def _find_ray(
    address: str, file: Mapping[str, Any], stack: ExitStack, say: Callable[[str], None]
) -> tuple[str, list[RayMachine]]:
    """Returns Ray's address and its live machines. Starts Ray here until `stack` is closed if there
    is none. Raises ConfigError."""
    if machines := _machines(address):
        return address, machines
    if file.get("nodes"):
        raise ConfigError(
            "ray: no Ray cluster was found for the nodes; start it with ray start --head here and"
            " ray start --address=... on the others, or give its HOST:PORT"
        )
    wants_host = any(each["name"] == HOST for each in file.get("devices", []))
    address = stack.enter_context(local_ray(int(wants_host)))
    say(f"no Ray cluster was found; started one at {address} for this command")
    return address, _machines(address)


def _launch_spec(
    file: str, address: str, machines: Sequence[RayMachine], options: Sequence[str]
) -> LaunchSpec:
    """Returns the specification for the driver. Raises ConfigError."""
    layout(file, machines)
    nodes = machines_with_devices(file, machines)
    used = list(machines) if nodes is None else nodes
    return LaunchSpec(address, file, new_secret(), used, tuple(options))


def _machines(address: str) -> list[RayMachine]:
    """Returns the live machines of Ray. Empty without a Ray cluster, if `address` is auto. Raises
    ConfigError."""
    _check_port(address)
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
        raise ConfigError(
            last.removeprefix(ERROR) or f"ray: its driver ended with exit code {done.returncode}"
        )
    return msgspec.json.decode(last, type=list[RayMachine])


def _check_port(address: str) -> None:
    """Raises ConfigError if nothing listens at `address`. Ray itself would retry for minutes."""
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
    """Supervisor of the driver process, which restarts it until a signal comes."""

    def __init__(self, spec: LaunchSpec, lease: ClusterLease, say: Callable[[str], None]) -> None:
        self._spec, self._lease, self._say = spec, lease, say
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._last, self._last_line_s = "", 0.0  # last line of the process, and time of any line
        self._settled = self._disconnected = False

    def run(self, signals: Sequence[int]) -> None:
        """Runs the driver until a signal comes or the lease is over. Raises ConfigError or
        NodeFailedError."""
        start_at_s = 0.0
        try:
            while not signals and not self._lease.is_over():
                now_s = time.monotonic()
                if self._process is None and now_s >= start_at_s:
                    self._start()
                elif self._process is not None and (code := self._process.poll()) is not None:
                    self._ended(code)
                    start_at_s = now_s + _RETRY_S
                elif self._process is not None and now_s - self._last_line_s > _SILENT_S:
                    self._process.kill()
                time.sleep(_POLL_S)
        finally:
            self._stop(signals)

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
        self._last, self._last_line_s = "", time.monotonic()
        self._reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, lines: IO[bytes]) -> None:
        """Reads the driver's lines. An empty line means that Ray answers and the driver does not
        hang."""
        with lines:
            for line in lines:
                self._last_line_s = time.monotonic()
                if not (text := line.decode(errors="replace").rstrip("\n")):
                    if self._disconnected:
                        self._say("reconnected to Ray")
                    self._disconnected = False
                    continue
                if text.startswith(MACHINES):
                    self._keep_machines(text.removeprefix(MACHINES))
                    continue
                self._last = text
                if not text.startswith(ERROR):
                    self._settled |= ": ready in " in text
                    self._say(text)

    def _keep_machines(self, text: str) -> None:
        """Stores the machines for the next driver."""
        machines = msgspec.json.decode(text, type=list[RayMachine])
        self._spec = msgspec.structs.replace(self._spec, machines=machines)

    def _ended(self, code: int) -> None:
        assert self._reader is not None
        self._reader.join()
        self._process, why = None, self._last.removeprefix(ERROR)
        if not self._settled:
            raise (ConfigError if code == EXIT_CONFIG else NodeFailedError)(why or f"exit {code}")
        if not self._disconnected:
            self._say(f"lost Ray ({why}); the machines keep working; reconnecting")
        self._disconnected = True

    # --- the end ----------------------------------------------------------------------------

    def _stop(self, signals: Sequence[int]) -> None:
        """Ends all machines by the lease, or by Ray if Redis does not answer. A second signal ends
        them at once."""
        until_s, sent, quiet_since_s = time.monotonic() + _STOP_S, 0, time.monotonic()
        while time.monotonic() < until_s:
            if sent < max(1, len(signals)):
                sent += 1
                self._signal_machines(KILL if sent > 1 else STOP)
            if self._process is not None and self._process.poll() is not None:
                self._process = None
            left = self._lease.nodes_left()
            if left or (left is None and self._process is not None):
                quiet_since_s = time.monotonic()
            elif time.monotonic() - quiet_since_s > self._quiet_s():
                if self._process is not None:
                    self._process.kill()
                return
            time.sleep(_POLL_S)
        self._say("not all machines ended in time")

    def _quiet_s(self) -> float:
        """Returns the time without nodes after which the cluster has ended."""
        if self._process is not None:
            return _DRIVER_S
        return _QUIET_S if self._disconnected else 0.0

    def _signal_machines(self, value: bytes) -> None:
        """Sends a value to the machines by Redis, or by Ray if Redis does not answer."""
        by_redis = self._lease.set(value)
        if self._process is None:
            return
        if self._disconnected:
            self._process.kill()  # it is connecting and does not know the machines
        elif self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM if by_redis else signal.SIGINT)


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Yields a list of the SIGTERM and SIGINT that arrive within the block."""
    signals: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {n: signal.signal(n, lambda number, _frame: signals.append(number)) for n in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
