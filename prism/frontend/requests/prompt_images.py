"""Images of a conversation in its prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prism.errors import RequestError
from prism.frontend.dispatch.request_log import RequestLog
from prism.frontend.http.error_bodies import OverloadedError, bad_request
from prism.frontend.images.client import ImageClient
from prism.frontend.images.preparation import PreparedImage
from prism.frontend.images.sources import image_data
from prism.frontend.live_config import LiveConfig
from prism.frontend.protocol.chat_types import Conversation
from prism.messages.image_tensors import PromptImage, Tensors
from prism.messages.model_spec import ModelSpec

# Images of all open requests of a frontend, which keeps them until the requests end.
OPEN_BYTES_MAX = 2 << 30

Prompt = tuple[list[int], tuple[PromptImage, ...]]


class PromptImages:
    """Preparation of images, in a process for each frontend. For one event loop."""

    def __init__(self, live: LiveConfig, log: RequestLog) -> None:
        self._live, self._log = live, log
        self._client = ImageClient()

    async def close(self) -> None:
        await self._client.close()

    async def prompt(self, model: ModelSpec, body: Conversation, ids: list[int]) -> Prompt:
        """Returns the prompt of a conversation with the tokens of its images, and these. `ids` have
        one placeholder for each. Raises RequestError."""
        urls, field = body.image_urls, body.prompt_field
        if model.images is None:
            raise no_images(model, body)
        limits, token = self._live.config.frontend.images, model.images.token_id
        if len(urls) > limits.count_max:
            most = f"at most {limits.count_max} are allowed (frontend.images.count_max)"
            raise bad_request(f"{field}: has {len(urls)} images; {most}", field)
        if (places := ids.count(token)) != len(urls):
            raise bad_request(
                f"{field}: the prompt has {places} placeholders for {len(urls)} images; remove"
                " placeholders from the text, or images that the chat template leaves out",
                field,
            )
        known: dict[str, PreparedImage] = {}
        for number, url in enumerate(urls):
            if url not in known:
                try:
                    data = await image_data(url, limits)
                    known[url] = await self._client.prepare(
                        model, data, limits.pixels_max, limits.timeout_s
                    )
                except ValueError as error:
                    raise bad_request(f"{field}: image {number} {error!s:.300}", field) from error
            size_bytes = _size_bytes(each.tensors for each in known.values())
            if size_bytes > limits.request_bytes:
                most = f"{limits.request_bytes} are allowed (frontend.images.request_max)"
                raise bad_request(
                    f"{field}: the images have {size_bytes} bytes as the model takes them; at most"
                    f" {most}; send fewer or smaller ones",
                    field,
                )
        self._check_open(known.values())
        return with_images(ids, [known[url] for url in urls], token)

    def _check_open(self, more: Iterable[PreparedImage]) -> None:
        """Raises OverloadedError if the open requests have too many images."""
        held = {image.digest: image.tensors for each in self._log for image in each.request.images}
        held |= {image.digest: image.tensors for image in more}
        if _size_bytes(held.values()) > OPEN_BYTES_MAX:
            raise OverloadedError("the open requests have too many images; try again later")


def no_images(model: ModelSpec, body: Conversation) -> RequestError:
    field = body.prompt_field
    return bad_request(f"{field}: {model.name} does not take images; remove them", field)


def with_images(ids: Sequence[int], images: Sequence[PreparedImage], token: int) -> Prompt:
    """Returns the prompt with the tokens of the images at their placeholders `token`."""
    prompt: list[int] = []
    placed: list[PromptImage] = []
    following = iter(images)
    for each in ids:
        if each != token:
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


def _size_bytes(images: Iterable[Tensors]) -> int:
    return sum(len(tensor.data) for image in images for tensor in image.values())
