"""Fork servers of SGLang that are forked from one process which has imported it.

The imports take 10 s of a CPU, and dozens of tests want a separate fork server. Each is a separate
process: it gets its descriptors, environment and arguments as a command would, and runs the fork
server's own `main`. The tests of whole clusters start the command itself.

`python -m tests.engines.preloaded CONTROL_FD` is the process that imports.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from typing import IO, NoReturn

from prism.config.checks.adapters import adapter_named
from prism.engines.processes import forkserver
from prism.engines.processes.fresh_engine import THREAD_SETTINGS

MESSAGE_BYTES = 1 << 20


class Preloaded:
    """A process that `start` forked, with the part of Popen's interface that the tests use."""

    def __init__(self, arguments: Sequence[str], env: dict[str, str], log: IO[bytes]) -> None:
        inputs, outputs, status = os.pipe(), os.pipe(), os.pipe()
        theirs = [inputs[0], outputs[1], log.fileno(), status[1]]
        control = importer()
        order = json.dumps([list(arguments), env]).encode()
        socket.send_fds(control, [order], theirs)
        self.pid = int(control.recv(MESSAGE_BYTES))
        for fd in (inputs[0], outputs[1], status[1]):
            os.close(fd)
        self.stdin = os.fdopen(inputs[1], "wb", buffering=0)
        self.stdout = os.fdopen(outputs[0], "rb", buffering=0)
        self._status = os.fdopen(status[0], "rb")
        self.returncode: int | None = None

    def wait(self, timeout_s: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("a preloaded fork server", timeout_s or 0.0)
            self.returncode = int(self._status.read())
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def importer() -> socket.socket:
    """Commands the process that has imported SGLang; it ends with this one, or with this socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.engines.preloaded", str(theirs.fileno())]
    env = {**os.environ, **dict.fromkeys(THREAD_SETTINGS, "1")}
    process = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env
    )
    theirs.close()

    def end() -> None:
        process.terminate()
        process.wait()
        ours.close()

    atexit.register(end)
    return ours


def main(control: socket.socket) -> None:
    gc.disable()  # until `forkserver.main` has it again
    before = set(os.environ)
    adapter_named("sglang").preload("host:0")
    imports_set = {name: os.environ[name] for name in set(os.environ) - before}
    gc.collect()
    gc.freeze()
    wake, writer = socket.socketpair()
    for end in (wake, writer):
        end.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
    statuses: dict[int, int] = {}
    while True:
        ready = select.select([control, wake], [], [])[0]
        if wake in ready:
            wake.recv(4096)
            report_ended(statuses)
        if control in ready:
            order, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 4)
            if not order:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for fd in [*statuses.values(), fds.pop(), *(s.detach() for s in (wake, writer))]:
                    os.close(fd)
                control.close()
                arguments, env = json.loads(order)
                be_fork_server(arguments, imports_set | env, fds)
            *given, statuses[pid] = fds
            for fd in given:
                os.close(fd)
            control.send(str(pid).encode())


def be_fork_server(arguments: list[str], env: dict[str, str], fds: list[int]) -> NoReturn:
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(env)
        status = forkserver.main(arguments)
    except Exception:
        traceback.print_exc()
        raise
    finally:
        os._exit(status)


def report_ended(statuses: dict[int, int]) -> None:
    for pid, fd in list(statuses.items()):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            os.write(statuses.pop(pid), str(os.waitstatus_to_exitcode(status)).encode())
            os.close(fd)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
