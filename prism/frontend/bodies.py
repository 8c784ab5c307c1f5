"""Read and check a request's body."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from prism.frontend.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    OverloadedError,
    bad_request,
    from_validation,
)
from prism.frontend.openai_types import TOKENS_MAX, RequestBody

# A million tokens as text or ids; a larger body would hold up every other request.
_BODY_BYTES_MAX = 8 << 20
# Below this, parsing takes less time than handing it to a thread.
_INLINE_BYTES_MAX = 64 << 10
# Of all bodies that are being received or parsed, beyond the first part of each.
BODIES_BYTES_MAX = 128 << 20
BODY_TIMEOUT_S = 60.0
# What is read of a body that is refused: a connection that is closed with bytes unread is reset,
# and the client may not read the answer.
_DISCARDED_BYTES_MAX = 128 << 20
_DISCARD_TIMEOUT_S = 10.0
# What is made of a body, by what JSON has for each. Millions take seconds, and nothing else runs.
_MOST = {
    "objects and lists": (b"[{", 32 << 10),
    "members of objects": (b":", 64 << 10),
    "values": (b",", TOKENS_MAX + (64 << 10)),
}
# A string without an end goes to the end of the body, so that no part is searched twice.
_STRING_OR_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+|[\[{:,]', re.DOTALL)
# One large body at a time: the event loop gets its turn between two steps of the parser.
_parser = ThreadPoolExecutor(1, thread_name_prefix="bodies")


class BodyMemory:
    """Bytes of the large bodies in flight."""

    def __init__(self) -> None:
        self.used_bytes = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """For one body: a function that says how many bytes it has by now. That raises
        OverloadedError where the others leave no room."""
        held_bytes = 0

        def grow(to_bytes: int) -> None:
            nonlocal held_bytes
            more_bytes = max(0, to_bytes - held_bytes)
            if self.used_bytes + more_bytes > BODIES_BYTES_MAX:
                raise OverloadedError("too many large bodies are being received; try again later")
            self.used_bytes += more_bytes
            held_bytes += more_bytes

        try:
            yield grow
        finally:
            self.used_bytes -= held_bytes


memory = BodyMemory()
Body = TypeVar("Body", bound=RequestBody)


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The body as `kind`, whatever content type the client names (curl -d sends a form's).

    Raises BadRequestError naming the first wrong field, BodyTooLargeError, BodyTimeoutError, or
    OverloadedError while many large bodies are being received.
    """
    try:
        return await _read(request, kind)
    except BodyTooLargeError:
        await _discard_rest(request)
        raise


async def _read(request: Request, kind: type[Body]) -> Body:
    _check_length(int(request.headers.get("content-length", 0)))
    with memory.share() as grow:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                data = await _receive(request, grow)
        except TimeoutError as error:
            raise BodyTimeoutError(
                f"the body was not complete after {BODY_TIMEOUT_S:g} s; send it faster"
            ) from error
        if len(data) <= _INLINE_BYTES_MAX:
            return parse_body(kind, data)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_parser, parse_body, kind, data)


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
    """Reads what the client goes on sending. One that waits for `100 Continue` sends nothing."""
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
    """Raises BadRequestError naming the first wrong field."""
    for what, (marks, most) in _MOST.items():
        if _has_more(data, marks, most):
            raise bad_request(f"the body has more than {most} {what}; send fewer")
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise from_validation(error, kind) from error
    body.refuse_unsupported()
    body.prepare()
    return body


def _has_more(data: bytes, marks: bytes, most: int) -> bool:
    """Returns whether there are more than `most` of these characters outside of strings."""
    if sum(data.count(mark) for mark in marks) <= most:
        return False
    found = (each for each in _STRING_OR_MARK.finditer(data) if data[each.start()] in marks)
    return next(islice(found, most, None), None) is not None
