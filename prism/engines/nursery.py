"""The parent of a device's engines: imports the adapter once, then forks ready processes.

`python -m prism.engines.nursery --adapter NAME --config PATH --device host:0`

One JSON line per `ForkEngine` on stdin; `NurseryReady`, `EngineForked` and `EngineExited` as JSON
lines on stdout, and nothing else (file descriptor 1 of everything else is stderr).
`EngineExited.status` is the exit code, or minus the signal's number. The end of stdin or SIGTERM
ends the engines (SIGTERM, after `TERMINATE_S` SIGKILL) and then this process. Engines die with
this process whatever ends it. An engine writes to `run_dir/logs/<engine_id>.log`.

Forking is safe only from a process with one thread, so thread pools are off before the imports.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import logging
import os
import re
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import msgspec

from prism.config import ClusterConfig, read_resolved
from prism.engines.core import EngineContext
from prism.engines.logs import EngineLogs
from prism.engines.ranks.spread import spread
from prism.engines.worker import run_engine
from prism.errors import ConfigError
from prism.nursery_messages import EngineExited, EngineForked, ForkEngine, FromNursery, NurseryReady
from prism.process import configure_logging, die_with_parent

TERMINATE_S = 5.0
ENGINE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
SM_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
THREAD_SETTINGS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

log = logging.getLogger("prism.nursery")


def load_adapter(name: str) -> ModuleType:
    """The package `prism.engines.<name>`. Raises ConfigError when there is none."""
    module = f"prism.engines.{name}"
    if not name.isidentifier() or importlib.util.find_spec(module) is None:
        raise ConfigError(f"engine.adapter: there is no adapter {name!r}; use sglang or fake")
    return importlib.import_module(module)


class Lines:
    """Whole lines from a pipe, read without blocking for more than is there."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self.ended = False

    def read(self) -> list[bytes]:
        data = os.read(self._fd, 65536)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line for line in lines if line.strip()]


class Nursery:
    """Forks engines, reaps them, reports both. One thread, no sleeps: it waits in select."""

    def __init__(self, adapter: ModuleType, config: ClusterConfig, device: str, out_fd: int):
        self._adapter = adapter
        self._config = config
        self._device = device
        self._out_fd = out_fd
        self._children: dict[int, str] = {}
        self._logs = EngineLogs(Path(config.run_dir) / "logs")
        self._stopping = False
        self._lines = Lines(sys.stdin.fileno())
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._lines._fd, selectors.EVENT_READ)
        self._wake, self._wake_writer = socket.socketpair()
        self._wake.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def run(self, import_s: float) -> None:
        self._handle_signals()
        self._report(NurseryReady(pid=os.getpid(), import_s=import_s))
        while not (self._stopping or self._lines.ended):
            self._turn()
        self._end_children()

    def _turn(self) -> None:
        ready = {key.fileobj for key, _ in self._selector.select()}
        if self._wake in ready:
            self._wake.recv(4096)
        self._reap()
        if self._lines._fd in ready:
            for line in self._lines.read():
                self._obey(line)

    def _handle_signals(self) -> None:
        """SIGINT of a terminal reaches the whole group; who started us decides what ends."""
        signal.set_wakeup_fd(self._wake_writer.fileno())
        signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
        signal.signal(signal.SIGTERM, lambda _signum, _frame: self._stop())
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _stop(self) -> None:
        self._stopping = True

    def _report(self, message: FromNursery) -> None:
        """One write per line. A reader that is gone shows as the end of stdin."""
        try:
            os.write(self._out_fd, msgspec.json.encode(message) + b"\n")
        except BrokenPipeError:
            log.warning("nobody reads: %s", type(message).__name__)

    def _obey(self, line: bytes) -> None:
        try:
            order = msgspec.json.decode(line, type=ForkEngine)
        except msgspec.MsgspecError as error:
            log.warning("dropped a malformed line of %d bytes: %s", len(line), error)
            return
        if not ENGINE_ID.fullmatch(order.engine_id):
            log.warning("dropped an order with an unusable engine id: %.100r", order.engine_id)
            return
        self._fork(order)

    # --- children --------------------------------------------------------------------------

    def _fork(self, order: ForkEngine) -> None:
        engine_id, parent_pid = order.engine_id, os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            log.error("cannot fork %s: %s", engine_id, error)
            self._report(EngineExited(engine_id=engine_id, pid=0, status=1))
            return
        if pid == 0:
            self._be_engine(order, parent_pid)
        self._children[pid] = engine_id
        self._logs.started(engine_id)
        self._report(EngineForked(engine_id=engine_id, pid=pid))

    def _be_engine(self, order: ForkEngine, parent_pid: int) -> NoReturn:
        """Runs in the child and never returns. `os._exit`: what the parent registered to run at
        its exit is not ours to run."""
        status, engine_id = 1, order.engine_id
        try:
            die_with_parent(parent_pid)
            self._leave_nursery(engine_id)
            # Read when the process makes its CUDA context, which nothing has done yet.
            os.environ[SM_VARIABLE] = str(order.sm_percent)
            context = EngineContext(engine_id, self._device, self._config)
            status = run_engine(context, spread(context, self._adapter.create, order.peers))
        except BaseException:
            log.exception("engine %s ends", engine_id)
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _leave_nursery(self, engine_id: str) -> None:
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
    """What is left of `bound_s`, again and again until nothing is."""
    deadline_s = time.monotonic() + bound_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        yield left_s


def redirect_to_log(path: Path) -> None:
    """stdin from nowhere, stdout and stderr into `path`, readable by this user only."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(null_fd)
    os.close(log_fd)


def log_to_stderr(name: str) -> None:
    configure_logging(f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")


def warn_about_threads() -> None:
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        log.warning("%d threads run after the imports: a fork may inherit a held lock", threads)


def take_stdout() -> int:
    """The real stdout; whatever prints from now on goes to stderr."""
    out_fd = os.dup(1)
    os.dup2(2, 1)
    return out_fd


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m prism.engines.nursery", description=__doc__)
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--device", required=True)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    out_fd = take_stdout()
    log_to_stderr(f"nursery-{options.device}")
    for name in THREAD_SETTINGS:
        os.environ.setdefault(name, "1")
    started_s = time.monotonic()
    try:
        adapter = load_adapter(options.adapter)
    except ConfigError as error:
        log.error("%s", error)
        return 2
    adapter.preload(options.device)
    config = read_resolved(options.config)
    warn_about_threads()
    gc.collect()
    gc.freeze()
    Nursery(adapter, config, options.device, out_fd).run(time.monotonic() - started_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
