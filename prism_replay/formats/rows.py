"""Conversion of CSV rows to requests. Every error names the file and line."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import parent_process
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from prism.errors import TraceError
from prism_replay.lengths import ARENA, LengthSource
from prism_replay.trace import REQUESTS_MAX, TraceRequest, numbered_lines

Row = Mapping[str, str]
Numbered = tuple[str, TraceRequest]
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadOptions:
    """Options for values that a source does not have, and for sources of rates over days."""

    seed: int = 0
    rate_rps: float = 1.0
    """Arrival rate for sources without times."""
    lengths: LengthSource = ARENA
    """Token counts for sources without them."""
    start_s: float = 0.0
    """Start of the window to read of a source of rates."""
    seconds: float = 3600.0
    """Length of that window."""
    thin: float = 1.0
    """Fraction of the requests to keep of a source of rates."""

    def __post_init__(self) -> None:
        if not (0 < self.rate_rps < math.inf and 0 < self.seconds < math.inf):
            raise TraceError("rate and seconds: must be > 0 and finite")
        if not (0 <= self.start_s < math.inf and 0 < self.thin <= 1):
            raise TraceError("start: must be >= 0; thin: must be > 0 and <= 1")


def poisson_times_s(options: ReadOptions) -> Iterator[float]:
    """Yields Poisson arrival times at options.rate_rps without end."""
    rng = np.random.default_rng([options.seed, 3])
    now_s = 0.0
    while True:
        now_s += float(rng.exponential(1 / options.rate_rps))
        yield now_s


def numbered_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yields ("file:line", row) for each line after the header. Raises TraceError."""
    lines = list(numbered_lines(path))
    try:
        rows = list(csv.DictReader([line.decode() for _, line in lines]))
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: is not valid CSV in UTF-8: {error}") from error
    if len(rows) != max(0, len(lines) - 1):
        raise TraceError(f"{path}: a quoted value spans lines; write one request per line")
    for (where, _), row in zip(lines[1:], rows, strict=True):
        yield where, row


def read_rows(path: Path, request: Callable[[Row], TraceRequest | None]) -> list[Numbered]:
    """Returns (file:line, request) of every row. Raises TraceError.

    Args:
        request: Converts a row; None leaves it out.
    """
    found = []
    for where, row in numbered_rows(path):
        made = converted(partial(request, row), where)
        if made is not None:
            found.append((where, checked(made, where)))
    return found


def converted(convert: Callable[[], T], where: str) -> T:
    """Returns convert(). Raises its errors as a TraceError that names the line."""
    try:
        return convert()
    except KeyError as error:
        raise TraceError(f"{where}: column {error} is missing; check --format") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise TraceError(f"{where}: {error}") from error


def checked(request: TraceRequest, where: str) -> TraceRequest:
    """Returns `request`. Raises TraceError if one of its values is out of range."""
    if not math.isfinite(request.timestamp):
        raise TraceError(f"{where}: the time is {request.timestamp}; give a number")
    if request.timestamp < 0:
        raise TraceError(f"{where}: the time {request.timestamp / 1000:g} s is below 0")
    for key, tokens in (("input", request.input_length), ("output", request.output_length)):
        if tokens < 1:
            raise TraceError(f"{where}: {tokens} {key} tokens; a request has at least 1")
    if not request.model:
        raise TraceError(f"{where}: the model does not have a name")
    return request


def check_request_count(requests: float, path: Path) -> None:
    """Raises TraceError if a source of rates gives more requests than fit in memory."""
    if requests > REQUESTS_MAX:
        raise TraceError(
            f"{path}: more than {REQUESTS_MAX:,} requests in this window; shorten or thin it"
        )


@cache
def warn_once(text: str) -> None:
    """Logs a warning once, and not in the worker processes of a sweep."""
    if parent_process() is None:
        _log.warning(text)


def starting_at_zero(path: Path, trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Sorts by arrival and shifts the first request to 0. Raises TraceError for an empty trace."""
    if not trace:
        raise TraceError(f"{path}: the trace is empty")
    requests = sorted(trace, key=lambda request: request.timestamp)
    start_ms = requests[0].timestamp
    return [
        msgspec.structs.replace(request, timestamp=round(request.timestamp - start_ms, 3))
        for request in requests
    ]


def strict_order(path: Path, rows: Sequence[Numbered]) -> list[TraceRequest]:
    """Returns the rows' requests. Raises TraceError with the first line that is out of order."""
    if not rows:
        raise TraceError(f"{path}: the trace is empty")
    last_ms = 0.0
    for where, request in rows:
        if request.timestamp < last_ms:
            raise TraceError(
                f"{where}: the time {request.timestamp / 1000:g} s is before the row above"
                f" ({last_ms / 1000:g} s); sort the rows by time"
            )
        last_ms = request.timestamp
    return [request for _, request in rows]
