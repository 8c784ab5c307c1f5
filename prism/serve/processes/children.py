"""One child process: its start, heartbeat and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prism.process import HEARTBEAT_VARIABLE, Heartbeat, child_environment, private_log
from prism.serve.processes.logs import log_tail

_DELAY_MIN_S = 0.5
_DELAY_MAX_S = 30.0
_STABLE_S = 60.0
EXIT_CONFIG = 2


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """Command `python -P -m MODULE ARGUMENTS`. -P: the working directory must not shadow
    modules."""

    name: str
    module: str
    arguments: Sequence[str]
    drain_s: float  # time to end after SIGTERM
    pass_fds: Sequence[int] = ()
    restart_arguments: Sequence[str] = ()  # added at restarts
    python: str = sys.executable


@dataclass(slots=True)
class RestartBackoff:
    """Delays of restarts. Each is twice as long as the one before. After a minute without a death
    they start over."""

    deaths: int = 0
    _restart_at_s: float = float("-inf")

    def died(self, now_s: float, answered_s: float | None = None) -> float:
        """Counts a death. Returns the delay of the restart in seconds.

        Args:
            now_s: Time of the death.
            answered_s: Time of the last answer. A hang does not count as running. None: now.
        """
        if not self.is_recent(now_s if answered_s is None else answered_s):
            self.deaths = 0
        delay_s = min(_DELAY_MAX_S, _DELAY_MIN_S * 2.0**self.deaths)
        self.deaths += 1
        self._restart_at_s = now_s + delay_s
        return delay_s

    def is_recent(self, now_s: float) -> bool:
        """Returns True if less than a minute of running has passed since the last restart."""
        return now_s - self._restart_at_s <= _STABLE_S


class Child:
    """A process in its own session, so that a terminal's Ctrl-C only reaches the launcher.

    Thread rule: the launcher's main thread (a child dies with the thread that started it).
    """

    def __init__(
        self, spec: ChildSpec, logs: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self.spec = spec
        self._variables = variables or {}
        self.name = spec.name
        self.log = logs / f"{spec.name}.log"
        self._heartbeat = Heartbeat()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Starts the process. Raises OSError."""
        again = self.spec.restart_arguments if self._process is not None else ()
        fd = self._heartbeat.fd
        self._heartbeat.reset()
        environment = {**child_environment(), **self._variables, HEARTBEAT_VARIABLE: str(fd)}
        # OpenMP threads of an engine spin, and would take CPU time from the other engines.
        environment.setdefault("OMP_NUM_THREADS", "1")
        with private_log(self.log) as log:
            self._process = subprocess.Popen(
                [self.spec.python, "-P", "-m", self.spec.module, *self.arguments(), *again],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(*self.spec.pass_fds, fd),
                start_new_session=True,
            )

    def arguments(self) -> Sequence[str]:
        """Returns the arguments of the process that is started now."""
        return self.spec.arguments

    def exit_code(self) -> int | None:
        """Returns None while the process runs, or if it was not started."""
        return self._process.poll() if self._process else None

    def beats(self) -> int:
        """Returns the number of heartbeats of its event loop since the start."""
        return self._heartbeat.count()

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, until_s: float) -> bool:
        """Waits until the monotonic time `until_s`. Returns True if the process has ended."""
        while self.running():
            if time.monotonic() > until_s:
                return False
            time.sleep(0.02)
        return True

    def kill(self) -> None:
        """Kills the process and the rest of its session, and waits for its end."""
        if self._process is not None:
            self.end_at_once()
            self._process.wait()

    def end_at_once(self) -> None:
        """Sends SIGKILL, also to a process that hangs. `exit_code` shows when it has ended."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def tail(self, lines: int) -> list[str]:
        """Returns the last lines of the log."""
        return log_tail(self.log, lines)
