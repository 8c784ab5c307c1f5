"""Bound on the CPU time of calls that hold up an event loop.

A call is interrupted by a timer of the kernel, also within a regular expression, which keeps the
interpreter's lock and ends for no other thread. Python lets the main thread alone be interrupted.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

# A call that catches the interruption, or code that cannot raise, is interrupted again after this.
_AGAIN_S = 0.02
_TICK_S = 0.01
P = ParamSpec("P")
T = TypeVar("T")


class _InterruptionError(BaseException):
    """Raised in the call, past what handles its own errors."""


class _Watch:
    """Call in progress of the main thread, and the timer that looks at it. The timer goes on after
    a call, since starting it for each of the many short calls would take longer than they do."""

    end_s = math.inf  # of the call, by the thread's CPU clock
    ticks = False

    def start(self) -> None:
        self.ticks = True
        if signal.getsignal(signal.SIGPROF) != self._look:
            signal.signal(signal.SIGPROF, self._look)
            # Python puts back the signal's default when it ends, which is the process's death.
            atexit.register(signal.setitimer, signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_PROF, _TICK_S, _TICK_S)

    def _look(self, _signal: int, _frame: FrameType | None) -> None:
        """Interrupts the call once it has used its time; the timer counts that of all threads."""
        if self.end_s == math.inf:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.ticks = False
        elif time.thread_time() >= self.end_s:
            self.end_s += _AGAIN_S
            raise _InterruptionError


_watch = _Watch()


class CpuBudget:
    """CPU seconds that the calls for one purpose may take. A call that takes more ends.

    For any thread. Calls of a thread that runs no event loop are made on `loop`, one at a time. A
    loop that does not run in the main thread, or no loop, leaves them without a limit.

    Args:
        left_s: what the first call may take.
        most_s: what no call may exceed, however much was added.
        loop: the event loop of the main thread.
    """

    def __init__(
        self, left_s: float, most_s: float, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._left_s = left_s
        self._most_s = most_s
        self._loop = loop

    def add(self, seconds: float) -> None:
        """Adds to what later calls may take."""
        self._left_s = min(self._most_s, self._left_s + seconds)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the call's result. Raises TimeoutError where the budget is used up: the call
        stopped anywhere, so that what it was changing must not be used again."""
        if self._loop is None or _runs_loop():
            return self._call(function, *args, **kwargs)

        async def called() -> T:
            return self._call(function, *args, **kwargs)

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result()

    def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)
        if self._left_s <= 0:
            raise TimeoutError("no CPU time is left for this call")
        began_s = time.thread_time()
        try:
            try:
                _watch.end_s = began_s + self._left_s
                if not _watch.ticks:
                    _watch.start()
                return function(*args, **kwargs)
            finally:
                _watch.end_s = math.inf
        except _InterruptionError:  # perhaps before the line above
            _watch.end_s = math.inf
            raise TimeoutError(f"the call took {self._left_s:g} s of CPU time") from None
        finally:
            self._left_s -= time.thread_time() - began_s


def _runs_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
