"""Entries of the queues' streams, decoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from prism.messages import MALFORMED_ERRORS
from prism.messages.requests import Request

_ATTEMPT_DIGITS_MAX = 9
_requests = msgspec.msgpack.Decoder(Request)


class Row(NamedTuple):
    """Entry of a stream."""

    stream: str  # its key
    entry: str  # its id
    fields: dict[bytes, bytes]


class Unplaced(NamedTuple):
    """Part of the unplaced queue."""

    cursor: str  # id of the last entry
    is_last: bool  # True if no entry follows
    requests: list[tuple[str, Request]]  # with their entries' ids, oldest first
    malformed: list[str]  # ids of entries that are not requests
    size: int  # of the whole queue
    open: dict[str, int]  # device -> number of requests that wait or run there


def decoded(
    rows: Iterable[Row],
) -> tuple[list[tuple[str, Request]], dict[str, tuple[str, int]]]:
    """Returns (entry id, request) pairs; and entry id -> (request id, attempt) of malformed
    entries, "" or 0 if one is missing."""
    requests: list[tuple[str, Request]] = []
    malformed: dict[str, tuple[str, int]] = {}
    for _, entry, fields in rows:
        try:
            requests.append((entry, _requests.decode(fields.get(b"body", b""))))
        except MALFORMED_ERRORS:
            malformed[entry] = text(fields.get(b"id", b"")), attempt(fields.get(b"attempt", b""))
    return requests, malformed


def attempt(value: bytes) -> int:
    """Returns the attempt that the text names, or 0 if it is not a number."""
    return int(value) if value.isdigit() and len(value) <= _ATTEMPT_DIGITS_MAX else 0


def text(value: bytes | str) -> str:
    """Decodes a name. Invalid UTF-8 is replaced, so that the result matches no valid name."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def texts(values: Sequence[bytes]) -> set[str]:
    return {text(value) for value in values}
