"""Reads and checks the bodies of requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from prism.frontend.http.error_bodies import (
    BodyTimeoutError,
    BodyTooLargeError,
    OverloadedError,
    bad_request,
    from_validation,
)
from prism.frontend.protocol.openai_types import TOKENS_MAX, RequestBody

# A million tokens as text or ids; a larger body would hold up every other request.
_BODY_BYTES_MAX = 8 << 20
# Below this, parsing takes less time than handing it to a thread.
_INLINE_BYTES_MAX = 64 << 10
# Limit on all bodies being received or parsed, without the first _INLINE_BYTES_MAX of each.
BODIES_BYTES_MAX = 128 << 20
BODY_TIMEOUT_S = 60.0
# Bytes read of a rejected body: closing a connection with unread bytes resets it, and the client
# may not receive the answer.
_DISCARDED_BYTES_MAX = 128 << 20
_DISCARD_TIMEOUT_S = 10.0
# Kind of JSON element -> (characters that mark one, maximum). Parsing millions of elements takes
# seconds, during which nothing else runs.
_COUNTS_MAX = {
    "objects and lists": (b"[{", 32 << 10),
    "members of objects": (b":", 64 << 10),
    "values": (b",", TOKENS_MAX + (64 << 10)),
}
# An unterminated string matches up to the end of the body, so that no part is searched twice.
_STRING_OR_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+|[\[{:,]', re.DOTALL)
# One thread: with one large body at a time, the event loop runs between two steps of the parser.
_parser = ThreadPoolExecutor(1, thread_name_prefix="bodies")


class BodyMemory:
    """Memory limit of the large bodies in flight."""

    def __init__(self) -> None:
        self.used_bytes = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that reserves memory for one body up to a size in bytes. It raises
        OverloadedError if the other bodies leave too little."""
        held_bytes = 0

        def grow(to_bytes: int) -> None:
            nonlocal held_bytes
            more_bytes = max(0, to_bytes - held_bytes)
            if self.used_bytes + more_bytes > BODIES_BYTES_MAX:
                raise OverloadedError("too many large bodies are in flight; try again later")
            self.used_bytes += more_bytes
            held_bytes += more_bytes

        try:
            yield grow
        finally:
            self.used_bytes -= held_bytes


memory = BodyMemory()
Body = TypeVar("Body", bound=RequestBody)
Parsed = TypeVar("Parsed")


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Returns the body as `kind`, ignoring its content type (`curl -d` sends that of a form).

    Raises BadRequestError naming the first invalid field, BodyTooLargeError, BodyTimeoutError, or
    OverloadedError while many large bodies are in flight.
    """
    with memory.share() as grow:
        data = await receive_body(request, grow)
        return await parsed(partial(parse_body, kind), data)


async def parsed(parse: Callable[[bytes], Parsed], data: bytes) -> Parsed:
    """Returns the result of `parse`, which runs in the parser's thread for a large body."""
    if len(data) <= _INLINE_BYTES_MAX:
        return parse(data)
    return await asyncio.get_running_loop().run_in_executor(_parser, parse, data)


async def receive_body(request: Request, grow: Callable[[int], None]) -> bytes:
    """Returns the body. `grow` reserves memory (`BodyMemory.share`).

    Raises BodyTooLargeError, BodyTimeoutError or OverloadedError.
    """
    try:
        _check_length(int(request.headers.get("content-length", 0)))
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _receive(request, grow)
    except TimeoutError as error:
        raise BodyTimeoutError(
            f"the body was not received within {BODY_TIMEOUT_S:g} s; send it faster"
        ) from error
    except BodyTooLargeError:
        await _discard_rest(request)
        raise


async def _receive(request: Request, grow: Callable[[int], None]) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        _check_length(len(data))
        grow(len(data) - _INLINE_BYTES_MAX)
    return bytes(data)


def _check_length(length_bytes: int) -> None:
    if length_bytes > _BODY_BYTES_MAX:
        raise BodyTooLargeError(f"the body exceeds {_BODY_BYTES_MAX >> 20} MiB; shorten it")


async def _discard_rest(request: Request) -> None:
    """Reads and drops the rest of the body. A client that awaits `100 Continue` sends none."""
    if request.headers.get("expect", "").lower() == "100-continue":
        return
    left_bytes = _DISCARDED_BYTES_MAX
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_DISCARD_TIMEOUT_S):
            async for part in request.stream():
                left_bytes -= len(part)
                if left_bytes < 0:
                    return


def parse_body(kind: type[Body], data: bytes) -> Body:
    """Returns the checked body. Raises BadRequestError naming the first invalid field."""
    check_counts(data)
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise from_validation(error, kind) from error
    body.reject_unsupported()
    body.prepare()
    return body


def check_counts(data: bytes) -> None:
    """Raises BadRequestError for a body with more elements than can be parsed at once."""
    for what, (marks, most) in _COUNTS_MAX.items():
        if _has_more(data, marks, most):
            raise bad_request(f"the body has more than {most} {what}; send fewer")


def _has_more(data: bytes, marks: bytes, most: int) -> bool:
    """Returns whether `data` has more than `most` of the characters `marks` outside of strings."""
    if sum(data.count(mark) for mark in marks) <= most:
        return False
    found = (each for each in _STRING_OR_MARK.finditer(data) if data[each.start()] in marks)
    return next(islice(found, most, None), None) is not None
