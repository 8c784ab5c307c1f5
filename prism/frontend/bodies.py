"""Read and check a request's body."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError

from prism.frontend.errors import BodyTooLargeError, from_validation
from prism.frontend.openai_types import GenerationBody

# A million tokens as text or ids; a larger body would hold up every other request.
_BODY_BYTES_MAX = 8 << 20
# Below this, parsing takes less time than handing it to a thread.
_INLINE_BYTES_MAX = 64 << 10
Body = TypeVar("Body", bound=GenerationBody)


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The body as `kind`, whatever content type the client names (curl -d sends a form's).

    Raises BadRequestError naming the first wrong field, or BodyTooLargeError.
    """
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > _BODY_BYTES_MAX:
            raise BodyTooLargeError(f"the body exceeds {_BODY_BYTES_MAX >> 20} MiB; shorten it")
    try:
        if len(data) <= _INLINE_BYTES_MAX:
            body = kind.model_validate_json(bytes(data))
        else:
            body = await asyncio.to_thread(kind.model_validate_json, bytes(data))
    except ValidationError as error:
        raise from_validation(error) from error
    body.refuse_unsupported()
    return body
