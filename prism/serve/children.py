"""One child process: how it is started, watched and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from prism.process import child_environment, private_log

_RESTARTS_MAX = 5
_RESTART_WINDOW_S = 60.0
_DELAY_MIN_S = 0.5
_DELAY_MAX_S = 8.0
EXIT_CONFIG = 2


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """`python -m MODULE ARGUMENTS`. drain_s: how long it may take to end after SIGTERM."""

    name: str
    module: str
    arguments: Sequence[str]
    drain_s: float
    pass_fds: Sequence[int] = ()


@dataclass(slots=True)
class RestartBudget:
    """At most 5 restarts a minute, each after twice the delay of the one before."""

    _restarts_s: deque[float] = field(default_factory=deque)

    def delay_s(self, now_s: float) -> float | None:
        """Seconds to wait before the next restart, which this call counts; None: give up."""
        while self._restarts_s and now_s - self._restarts_s[0] > _RESTART_WINDOW_S:
            self._restarts_s.popleft()
        recent = len(self._restarts_s)
        if recent >= _RESTARTS_MAX:
            return None
        self._restarts_s.append(now_s)
        return min(_DELAY_MAX_S, _DELAY_MIN_S * 2.0**recent)


class Child:
    """A process in a session of its own, so that a terminal's Ctrl-C reaches the launcher alone.

    Thread rule: the launcher's main thread (a child dies with the thread that started it).
    """

    def __init__(
        self, spec: ChildSpec, logs: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self.spec = spec
        self._variables = variables or {}
        self.log = logs / f"{spec.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        environment = {**child_environment(), **self._variables}
        # More than one OpenMP thread per engine spins against the other engines.
        environment.setdefault("OMP_NUM_THREADS", "1")
        with private_log(self.log) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.spec.module, *self.spec.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=self.spec.pass_fds,
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """None while it runs, or when it was not started."""
        return self._process.poll() if self._process else None

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, until_s: float) -> bool:
        """Whether it has ended before the monotonic time `until_s`."""
        while self.running():
            if time.monotonic() > until_s:
                return False
            time.sleep(0.02)
        return True

    def kill(self) -> None:
        """The process, and whatever it left in its session."""
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_line(self) -> str:
        """The last line of its log: for a configuration error, the message."""
        lines = self.tail(1)
        return lines[0] if lines else f"{self.spec.name} said nothing"

    def tail(self, lines: int) -> list[str]:
        try:
            return self.log.read_text(errors="replace").splitlines()[-lines:]
        except OSError:
            return []
