"""Conversion of a request's images to SGLang's inputs of the vision tower."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs

from prism.errors import BadRequestError
from prism.messages.image_tensors import PromptImage, Tensor
from prism.messages.requests import Request

_GRID = "image_grid_thw"  # of models whose positions have three dimensions


def of_request(request: Request, model_config: Any) -> MultimodalInputs | None:
    """Returns the images of `request`, None if it has none. Raises BadRequestError for images that
    are not those of the prompt.

    The prefix cache distinguishes images by their digest, which replaces their placeholders.
    """
    if not request.images:
        return None
    items = [_item(image, len(request.prompt_ids)) for image in request.images]
    config = model_config.hf_config
    inputs = MultimodalInputs(items, im_token_id=_token_id(config))
    if model_config.model_is_mrope:
        _set_positions(inputs, request, config)
    return inputs


def _token_id(config: Any) -> int:
    names = ("image_token_id", "image_token_index")
    found = (getattr(config, name, None) for name in names)
    token = next((each for each in found if each is not None), None)
    if token is None:
        raise BadRequestError("the model does not take images; remove them")
    return int(token)


def _item(image: PromptImage, prompt_tokens: int) -> MultimodalDataItem:
    tensors = {name: _tensor(name, each) for name, each in image.tensors.items()}
    feature = tensors.pop("pixel_values", None)
    runs, following = [], 0
    for first, last in image.runs:
        if not following <= first <= last < prompt_tokens:
            raise BadRequestError(f"image {image.digest:.8}: its placeholders are not in order")
        runs.append((first, last))
        following = last + 1
    if feature is None or not runs:
        raise BadRequestError(f"image {image.digest:.8}: does not have pixels and placeholders")
    item = MultimodalDataItem(
        modality=Modality.IMAGE, feature=feature, offsets=runs, model_specific_data=tensors
    )
    item.set_identity(bytes.fromhex(image.digest))
    return item


def _tensor(name: str, tensor: Tensor) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise BadRequestError(f"{name}: {tensor.dtype!r:.40} is not a dtype")
    if len(tensor.data) != prod(tensor.shape) * dtype.itemsize:
        raise BadRequestError(f"{name}: has another size than its shape")
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).view(tensor.shape)


def _set_positions(inputs: MultimodalInputs, request: Request, config: Any) -> None:
    """Sets the positions of the prompt and of the whole output. SGLang would extend those of the
    prompt for decode steps alone, not when a retracted or resumed request is computed again.

    Images have one frame, so the positions of all families are Qwen2-VL's.
    """
    start = getattr(config, "vision_start_token_id", None)
    prompt, delta = MRotaryEmbedding.get_rope_index(
        spatial_merge_size=config.vision_config.spatial_merge_size,
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        vision_start_token_id=config.image_start_token_id if start is None else start,
        model_type="qwen2_vl",
        input_ids=torch.tensor([request.prompt_ids], dtype=torch.long),
        image_grid_thw=torch.cat([getattr(item, _GRID) for item in inputs.mm_items]),
    )
    prompt = prompt.squeeze(1)
    following = int(prompt.max()) + 1
    output = torch.arange(following, following + request.sampling.max_tokens)
    inputs.mrope_positions = torch.cat([prompt, output.expand(3, -1)], dim=1)
    inputs.mrope_position_delta = delta
