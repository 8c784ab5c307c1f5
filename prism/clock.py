"""The wall clock that all processes of a cluster share: that of their Redis.

Machines' own clocks may be minutes apart. So no time of one machine's clock is compared with
another one's: what goes from process to process is in Redis's time, which each works out from its
monotonic clock and from what Redis said last. Until then it takes its machine's clock.
"""

from __future__ import annotations

import time


class _Clock:
    def __init__(self) -> None:
        self.ahead_s = time.time() - time.monotonic()


_clock = _Clock()


def ahead_s() -> float:
    """The cluster's time less this machine's monotonic clock."""
    return _clock.ahead_s


def unix_s() -> float:
    return time.monotonic() + _clock.ahead_s


def heard(server_unix_s: float, asked_s: float, answered_s: float) -> None:
    """Redis said its time between these two moments of the monotonic clock. It was read at any of
    them: a time that may be what is known already changes nothing."""
    middle_s, error_s = (asked_s + answered_s) / 2, (answered_s - asked_s) / 2
    found_s = server_unix_s - middle_s
    if abs(found_s - _clock.ahead_s) > error_s:
        _clock.ahead_s = found_s
