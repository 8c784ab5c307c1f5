"""Images of a conversation in its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from weakref import WeakValueDictionary

from msgspec import structs

from prism.config.schema.image_limits import ImagesConfig
from prism.frontend.dispatch.request_log import RequestLog
from prism.frontend.http import calls
from prism.frontend.http.error_bodies import OverloadedError, bad_request
from prism.frontend.http.fair_lock import client_name
from prism.frontend.images.client import ImageClient
from prism.frontend.images.preparation import PreparedImage
from prism.frontend.images.sources import image_data, is_inline
from prism.frontend.live_config import LiveConfig
from prism.frontend.protocol.chat_types import Conversation
from prism.messages.image_tensors import PromptImage, Tensors, size_bytes
from prism.messages.model_spec import ImageSpec, ModelSpec

# Images of a frontend's requests, from their preparation to the end of the request.
OPEN_BYTES_MAX = 2 << 30
# Images that are fetched at once, for all clients and for one.
FETCHES_MAX, CLIENT_FETCHES_MAX = 16, 4

Prompt = tuple[list[int], tuple[PromptImage, ...]]


class PromptImages:
    """Preparation of images, in a process for each frontend. For one event loop."""

    def __init__(self, live: LiveConfig, log: RequestLog) -> None:
        self._live, self._log = live, log
        self._client = ImageClient()
        # Images of HTTP requests by digest. They are in the log too once it has their requests.
        self._prepared: dict[object, dict[str, Tensors]] = {}
        self._fetches = asyncio.Semaphore(FETCHES_MAX)
        # So that one client's slow servers do not stall the others.
        self._client_fetches: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def close(self) -> None:
        await self._client.close()

    async def prompt(
        self, model: ModelSpec, spec: ImageSpec, body: Conversation, ids: list[int]
    ) -> Prompt:
        """Returns the prompt of a conversation with the tokens of its images, and these. `ids` have
        one placeholder for each. Raises RequestError."""
        placeholder = spec.token_id if spec.prompt_token_id is None else spec.prompt_token_id
        urls, field = body.image_urls, body.prompt_field
        limits = self._live.config.frontend.images
        if len(urls) > limits.count_max:
            most = f"at most {limits.count_max} are allowed (frontend.images.count_max)"
            raise bad_request(f"{field}: has {len(urls)} images; {most}", field)
        if (places := ids.count(placeholder)) != len(urls):
            raise bad_request(
                f"{field}: the prompt has {places} placeholders for {len(urls)} images; remove"
                " placeholders from the text, or images that the chat template leaves out",
                field,
            )
        known: dict[str, PreparedImage] = {}
        prepared = self._hold()
        for number, url in enumerate(urls):
            if url not in known:
                try:
                    data = await self._data(url, limits)
                    image = await self._client.prepare(
                        model, data, limits.pixels_max, limits.timeout_s
                    )
                except ValueError as error:
                    raise bad_request(f"{field}: image {number} {error!s:.300}", field) from error
                known[url] = self._shared(image, prepared)
            total_bytes = size_bytes(prepared.values())
            if total_bytes > limits.request_bytes:
                most = f"{limits.request_bytes} are allowed (frontend.images.request_max)"
                raise bad_request(
                    f"{field}: the images have {total_bytes} bytes as the model takes them; at most"
                    f" {most}; send fewer or smaller ones",
                    field,
                )
        return with_images(ids, [known[url] for url in urls], spec.token_id, placeholder)

    def _hold(self) -> dict[str, Tensors]:
        """Returns a new entry of `_prepared`, which the end of the HTTP request removes."""
        key, prepared = object(), dict[str, Tensors]()
        if (call := calls.current.get()) is not None:
            self._prepared[key] = prepared
            call.at_end.append(lambda: self._prepared.pop(key))
        return prepared

    def _shared(self, image: PreparedImage, prepared: dict[str, Tensors]) -> PreparedImage:
        """Adds an image to `prepared`, and returns it with the tensors of an equal one if there is
        one. Raises OverloadedError if all requests have too many images."""
        held = {each.digest: each.tensors for open_ in self._log for each in open_.request.images}
        for others in self._prepared.values():
            held |= others
        tensors = held.setdefault(image.digest, image.tensors)
        if size_bytes(held.values()) > OPEN_BYTES_MAX:
            raise OverloadedError("the open requests have too many images; try again later")
        prepared[image.digest] = tensors
        return structs.replace(image, tensors=tensors)

    async def _data(self, url: str, limits: ImagesConfig) -> bytes:
        """Returns the file of an image. Raises ValueError. Addresses wait for their turn."""
        if is_inline(url):
            return await image_data(url, limits)
        fresh = asyncio.Semaphore(CLIENT_FETCHES_MAX)
        own = self._client_fetches.setdefault(client_name(), fresh)
        async with own, self._fetches:
            return await image_data(url, limits)


def with_images(
    ids: Sequence[int], images: Sequence[PreparedImage], token: int, placeholder: int
) -> Prompt:
    """Returns the prompt with the tokens of the images in place of `placeholder`. `token`: the one
    that stands for a vector."""
    prompt: list[int] = []
    placed: list[PromptImage] = []
    following = iter(images)
    for each in ids:
        if each != placeholder:
            prompt.append(each)
            continue
        image = next(following)
        runs = _runs(image.token_ids, token, len(prompt))
        placed.append(PromptImage(image.digest, runs, image.tensors))
        prompt += image.token_ids
    return prompt, tuple(placed)


def _runs(ids: Sequence[int], token: int, start: int) -> tuple[tuple[int, int], ...]:
    """Returns the first and last place of each run of `token`. `start`: place of the first id."""
    runs: list[tuple[int, int]] = []
    for place, each in enumerate(ids, start):
        if each != token:
            continue
        if runs and runs[-1][1] == place - 1:
            runs[-1] = runs[-1][0], place
        else:
            runs.append((place, place))
    return tuple(runs)
