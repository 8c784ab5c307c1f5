"""Wall clock of a cluster: the clock of its Redis.

The clocks of machines may differ by minutes, so times of different machines are never compared.
Every time that is sent to another process is in Redis's time. Each process derives it from its
monotonic clock and the last time that Redis reported. Until the first report, it uses the clock of
its machine.
"""

from __future__ import annotations

import time


class _Clock:
    def __init__(self) -> None:
        self.offset_s = time.time() - time.monotonic()


_clock = _Clock()


def ahead_s() -> float:
    """Returns the cluster's time minus this machine's monotonic clock."""
    return _clock.offset_s


def unix_s() -> float:
    """Returns the cluster's time in seconds since the epoch."""
    return time.monotonic() + _clock.offset_s


def synchronize(server_unix_s: float, asked_s: float, answered_s: float) -> None:
    """Adjusts the clock to a time that Redis reported.

    Does nothing if the known offset is within the error of the measurement.

    Args:
        server_unix_s: Time of Redis, read at an unknown moment between the two below.
        asked_s: Monotonic time at which the request was sent.
        answered_s: Monotonic time at which the answer arrived.
    """
    middle_s, error_s = (asked_s + answered_s) / 2, (answered_s - asked_s) / 2
    found_s = server_unix_s - middle_s
    if abs(found_s - _clock.offset_s) > error_s:
        _clock.offset_s = found_s
