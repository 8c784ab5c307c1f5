"""Bound on the CPU time of calls that hold up an event loop.

A call is interrupted by a timer of the kernel, also within a regular expression, which keeps the
interpreter's lock and ends for no other thread. Python lets the main thread alone be interrupted.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

# A call that catches the interruption, or code that cannot raise, is interrupted again after this.
_AGAIN_S = 0.02
_TICK_S = 0.01
_LEAST_S = 0.001  # less than a microsecond would be no timer
P = ParamSpec("P")
T = TypeVar("T")

_ends_s: list[float] = []  # of the call in progress, by the main thread's CPU clock


class _InterruptionError(BaseException):
    """Raised in the call, past what handles its own errors."""


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
            return _interrupted_after(self._left_s, function, *args, **kwargs)
        finally:
            self._left_s -= time.thread_time() - began_s


def _runs_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _interrupted_after(
    cpu_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """REQUIRES: the main thread, and no other such call around it."""
    if signal.getsignal(signal.SIGPROF) is not _check:
        signal.signal(signal.SIGPROF, _check)
    try:
        try:
            _ends_s.append(time.thread_time() + cpu_s)
            signal.setitimer(signal.ITIMER_PROF, max(cpu_s, _LEAST_S), _TICK_S)
            return function(*args, **kwargs)
        finally:
            _disarm()
    except _InterruptionError:
        _disarm()  # the interruption may have come before the same call above
        raise TimeoutError(f"the call took {cpu_s:g} s of CPU time") from None


def _disarm() -> None:
    _ends_s.clear()
    signal.setitimer(signal.ITIMER_PROF, 0)


def _check(_signal: int, _frame: FrameType | None) -> None:
    """The timer counts the CPU time of all threads."""
    if _ends_s and time.thread_time() >= _ends_s[-1]:
        _ends_s[-1] += _AGAIN_S
        raise _InterruptionError
