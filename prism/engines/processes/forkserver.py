"""Parent process of a device's engines: imports the adapter once, then forks the engines.

`python -m prism.engines.processes.forkserver --adapter NAME --config PATH --device host:0`

The process reads `ForkEngine` orders from stdin, one JSON line each. It writes `ForkServerReady`,
`EngineForked` and `EngineExited` to stdout as JSON lines, and nothing else: other output goes to
stderr. `EngineExited.status` is the exit code, or minus the signal's number. The end of stdin, or
SIGTERM, ends the engines (SIGTERM, after `TERMINATE_S` SIGKILL) and then this process. Engines die
with this process however it ends. An engine logs to `run_dir/logs/<engine_id>.log`.

With `--preloaded SOCKET` this process starts no engines: it imports the adapter, and forks a fork
server for each client that connects to the socket (`preloaded.py`).

Forking is safe only from a process with one thread, so thread pools are off before the imports.
CUDA does not survive a fork either. If the imports initialised CUDA, this process executes itself
again with `--fresh`: it then imports nothing, and each engine is a fresh process
(`fresh_engine.py`).
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import re
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import msgspec

from prism.config.checks.adapters import adapter_named
from prism.config.resolved import read_resolved
from prism.config.schema.cluster_config import ClusterConfig
from prism.engines import cuda_facts
from prism.engines.core import EngineContext
from prism.engines.processes import fresh_engine
from prism.engines.processes.fresh_engine import (
    SM_VARIABLE,
    THREAD_SETTINGS,
    log_to_stderr,
    redirect_to_log,
)
from prism.engines.processes.preloaded import Preloaded
from prism.engines.processes.rank_launch import launch_ranks, remove_rendezvous
from prism.engines.processes.worker import run_engine
from prism.errors import ConfigError
from prism.messages import MALFORMED_ERRORS
from prism.messages.forking import (
    EngineExited,
    EngineForked,
    ForkEngine,
    ForkServerReady,
    FromForkServer,
)
from prism.process import die_with_parent, flush_log, fork_child

TERMINATE_S = 5.0
ENDED_LOGS_MAX = 8
ENGINE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
LINE_BYTES_MAX = 64 << 10

log = logging.getLogger("prism.forkserver")


class PipeLines:
    """Reader of whole lines from a pipe, which does not block once the pipe is readable. The start
    of a line longer than LINE_BYTES_MAX is dropped."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self.ended = False

    def read(self) -> list[bytes]:
        data = os.read(self._fd, 65536)
        self.ended = not data
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-LINE_BYTES_MAX:]
        return [line for line in lines if line.strip()]


class EngineLogs:
    """Log files of engines, one each; engine ids are not reused.

    Logs are kept for running engines and for the last `ENDED_LOGS_MAX` that ended, so that engines
    that keep crashing do not fill the disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ended: dict[str, None] = {}

    def path(self, engine_id: str) -> Path:
        return self._folder / f"{engine_id}.log"

    def started(self, engine_id: str) -> None:
        self._ended.pop(engine_id, None)

    def ended(self, engine_id: str) -> None:
        """Records an engine's end, and removes the oldest log beyond `ENDED_LOGS_MAX`."""
        self.started(engine_id)
        self._ended[engine_id] = None
        if len(self._ended) > ENDED_LOGS_MAX:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            for path in (self.path(oldest), self._folder / f"{oldest}.log.1"):
                path.unlink(missing_ok=True)


Launch = Callable[[ForkEngine], int]


class ForkServer:
    """Starts engines, reaps them, and reports both. It has one thread, which waits in select.

    Args:
        launch: starts an engine in a fresh process and returns its pid. None: engines are forked.
    """

    def __init__(
        self,
        adapter: ModuleType,
        config: ClusterConfig,
        device: str,
        out_fd: int,
        launch: Launch | None = None,
    ) -> None:
        self._adapter = adapter
        self._config = config
        self._device = device
        self._out_fd = out_fd
        self._launch = launch or self._fork
        self._children: dict[int, str] = {}
        self._logs = EngineLogs(Path(config.run_dir) / "logs")
        self._stopping = False
        self._lines = PipeLines(sys.stdin.fileno())
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._lines._fd, selectors.EVENT_READ)
        self._wake, self._wake_writer = socket.socketpair()
        self._wake.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def run(self, import_s: float) -> None:
        self._handle_signals()
        # Left by an earlier fork server, whose engines have ended with it.
        remove_rendezvous(Path(self._config.run_dir), f"{self._device.replace(':', '')}-e*")
        self._report(ForkServerReady(pid=os.getpid(), import_s=import_s))
        while not (self._stopping or self._lines.ended):
            self._iterate()
        self._end_children()

    def _iterate(self) -> None:
        ready = {key.fileobj for key, _ in self._selector.select()}
        if self._wake in ready:
            self._wake.recv(4096)
        self._reap()
        if self._lines._fd in ready:
            for line in self._lines.read():
                self._handle(line)

    def _handle_signals(self) -> None:
        """Sets the handlers. A terminal sends SIGINT to the whole process group; it is ignored,
        since the agent ends this process."""
        signal.set_wakeup_fd(self._wake_writer.fileno())
        signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
        signal.signal(signal.SIGTERM, lambda _signum, _frame: self._stop())
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _stop(self) -> None:
        self._stopping = True

    def _report(self, message: FromForkServer) -> None:
        """Writes a line with one write. If the agent is gone, stdin ends too."""
        try:
            os.write(self._out_fd, msgspec.json.encode(message) + b"\n")
        except BrokenPipeError:
            log.warning("the agent is gone and does not receive %s", type(message).__name__)

    def _handle(self, line: bytes) -> None:
        try:
            order = msgspec.json.decode(line, type=ForkEngine)
        except MALFORMED_ERRORS as error:
            log.warning("dropped a malformed line of %d bytes: %s", len(line), error)
            return
        if not ENGINE_ID.fullmatch(order.engine_id):
            log.warning("dropped an order with an invalid engine id: %.100r", order.engine_id)
            return
        self._start(order)

    # --- children --------------------------------------------------------------------------

    def _start(self, order: ForkEngine) -> None:
        engine_id = order.engine_id
        try:
            pid = self._launch(order)
        except OSError as error:
            log.error("cannot start %s: %s", engine_id, error)
            self._report(EngineExited(engine_id=engine_id, pid=0, status=1))
            return
        self._children[pid] = engine_id
        self._logs.started(engine_id)
        self._report(EngineForked(engine_id=engine_id, pid=pid))

    def _fork(self, order: ForkEngine) -> int:
        run = partial(self._run_engine, order)
        return fork_child("prism-engine", run, log, f"engine {order.engine_id}")

    def _run_engine(self, order: ForkEngine) -> int:
        """Runs in the child. Returns the exit code."""
        self._leave_fork_server(order.engine_id)
        # CUDA reads it when this process creates its context, which does not exist yet.
        os.environ[SM_VARIABLE] = str(order.sm_percent)
        context = EngineContext(order.engine_id, self._device, self._config)
        return run_engine(context, launch_ranks(context, self._adapter.create, order.peers))

    def _leave_fork_server(self, engine_id: str) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._selector.close()
        self._wake.close()
        self._wake_writer.close()
        os.close(self._out_fd)
        redirect_to_log(self._logs.path(engine_id))
        log_to_stderr(engine_id)

    def _reap(self) -> None:
        for pid, engine_id in list(self._children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._children[pid]
                self._logs.ended(engine_id)
                remove_rendezvous(Path(self._config.run_dir), engine_id)
                code = os.waitstatus_to_exitcode(status)
                self._report(EngineExited(engine_id=engine_id, pid=pid, status=code))

    def _end_children(self) -> None:
        for sig in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._children:
                os.kill(pid, sig)
            for wait_s in remaining_s(TERMINATE_S):
                if not self._children:
                    return
                self._selector_wait(wait_s)
                self._reap()

    def _selector_wait(self, wait_s: float) -> None:
        if self._lines._fd in self._selector.get_map():
            self._selector.unregister(self._lines._fd)
        if self._selector.select(wait_s):
            self._wake.recv(4096)


def remaining_s(bound_s: float) -> Iterator[float]:
    """Yields the remaining seconds of `bound_s` until none are left."""
    deadline_s = time.monotonic() + bound_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        yield left_s


def warn_about_threads() -> None:
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        log.warning("%d threads run after the imports; a fork may inherit a held lock", threads)


def take_stdout() -> int:
    """Returns a descriptor of the real stdout. Later prints go to stderr."""
    out_fd = os.dup(1)
    os.dup2(2, 1)
    return out_fd


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m prism.engines.processes.forkserver", description=__doc__
    )
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--fresh", action="store_true", help="start engines in fresh processes")
    parser.add_argument(
        "--import-s", type=float, default=0.0, help="duration of the imports before --fresh"
    )
    parser.add_argument("--preloaded", type=Path, help="socket on which to fork fork servers")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    log_to_stderr(f"forkserver-{options.device}")
    for name in THREAD_SETTINGS:
        os.environ.setdefault(name, "1")
    started_s = time.monotonic()
    if options.preloaded:
        die_with_parent()
    out_fd, forks = None if options.preloaded else take_stdout(), True
    try:
        adapter = adapter_named(options.adapter)
    except ConfigError as error:
        log.error("%s", error)
        return 2
    if not options.fresh:
        gc.disable()  # imports leave no garbage, and collections take a tenth of their time
        adapter.preload(options.device)
        # Asked before any fork: in a fork of this process CUDA reports that it is not initialised.
        forks = not cuda_facts.is_initialized()
        warn_about_threads()
        gc.collect()
        gc.freeze()
        gc.enable()
    options.import_s += time.monotonic() - started_s
    if options.preloaded:
        Preloaded(options.preloaded, partial(serve, options, adapter, forks)).run()
    return serve(options, adapter, forks, out_fd)


def serve(
    options: argparse.Namespace, adapter: ModuleType, forks: bool, out_fd: int | None = None
) -> int:
    """Runs a fork server on descriptors 0, 1 and 2. Returns the exit code.

    Args:
        forks: False if the imports initialised CUDA, so that this process must not fork.
        out_fd: the real stdout, if it was taken before the imports.
    """
    out_fd = take_stdout() if out_fd is None else out_fd
    if not forks:
        _restart_fresh(options, out_fd)
    launch = partial(_launch_fresh, options) if options.fresh else None
    config = read_resolved(options.config).local()
    ForkServer(adapter, config, options.device, out_fd, launch).run(options.import_s)
    return 0


def _launch_fresh(options: argparse.Namespace, order: ForkEngine) -> int:
    return fresh_engine.start(order, options.adapter, options.config, options.device)


def _restart_fresh(options: argparse.Namespace, out_fd: int) -> NoReturn:
    """Executes a fork server that starts fresh processes. This frees what CUDA holds here."""
    log.warning(
        "the imports initialised CUDA, so engines cannot be forked from this process: each starts"
        " in a fresh process, which takes %.0f s of imports and shares no memory with the others",
        options.import_s,
    )
    flush_log()
    os.dup2(out_fd, 1)
    os.close(out_fd)
    command = ["-m", "prism.engines.processes.forkserver", "--adapter", options.adapter, "--fresh"]
    command += ["--import-s", str(options.import_s)]
    command += ["--config", str(options.config), "--device", options.device]
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    sys.exit(main())
