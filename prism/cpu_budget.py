"""Limit on the CPU time of calls that block an event loop.

A call is interrupted by a kernel timer. The timer also interrupts regular expressions, which keep
the interpreter's lock, so that no other thread could stop them. Python only interrupts the main
thread.
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

# Interval of repeated interruptions, for calls that catch the first one or cannot raise.
_RETRY_S = 0.02
_TICK_S = 0.01
P = ParamSpec("P")
T = TypeVar("T")


class _InterruptionError(BaseException):
    """Raised inside the call. No `except Exception` in the call catches it."""


class _Watch:
    """Call that the main thread is executing, and the timer that checks it. The timer keeps running
    after a call: starting it for each of many short calls would take longer than the calls."""

    end_s = math.inf  # CPU time of the thread at which the call is interrupted
    ticks = False  # True while the timer runs

    def start(self) -> None:
        self.ticks = True
        if signal.getsignal(signal.SIGPROF) != self._on_tick:
            signal.signal(signal.SIGPROF, self._on_tick)
            # Python restores the default action at exit, which would kill the process.
            atexit.register(signal.setitimer, signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_PROF, _TICK_S, _TICK_S)

    def _on_tick(self, _signal: int, _frame: FrameType | None) -> None:
        """Interrupts the call if its time is used up. The timer itself counts the time of all
        threads."""
        if self.end_s == math.inf:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.ticks = False
        elif time.thread_time() >= self.end_s:
            self.end_s += _RETRY_S
            raise _InterruptionError


_watch = _Watch()


class CpuBudget:
    """Budget of CPU seconds for calls of one purpose. A call that exceeds it is interrupted.

    Thread rule: any thread. A thread without an event loop makes its calls on `loop`, one at a
    time. Calls on a loop outside of the main thread, or without any loop, are not limited.

    Args:
        left_s: Seconds available to the first call.
        most_s: Upper limit of the budget, however much is added.
        loop: Event loop of the main thread.
    """

    def __init__(
        self, left_s: float, most_s: float, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._left_s = left_s
        self._most_s = most_s
        self._loop = loop

    def add(self, seconds: float) -> None:
        """Adds seconds to the budget of later calls."""
        self._left_s = min(self._most_s, self._left_s + seconds)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the call's result. Raises TimeoutError if the budget is used up. The call may
        have stopped anywhere, so objects that it was changing must not be used again."""
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
        except _InterruptionError:  # possibly raised before the line above
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
