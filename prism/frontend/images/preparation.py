"""Preparation of images for a model, by the processor of its files."""

from __future__ import annotations

import io
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from prism.messages.image_tensors import Tensor, Tensors
from prism.models.hugging_face import import_transformers

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_SIZES = ("image_grid_thw", "image_sizes")  # inputs of vision towers next to the pixels


class PreparedImage(msgspec.Struct, frozen=True):
    """Image as a model takes it."""

    digest: str  # of the tensors, 32 bytes in hexadecimal
    token_ids: list[int]  # that stand for it in a prompt
    tensors: Tensors


class Preparer:
    """Processors of models, loaded at their first image."""

    def __init__(self) -> None:
        self._processors: dict[str, Any] = {}

    def load(self, folder: str) -> Any:
        """Returns the processor of the model in `folder`. Raises errors of transformers."""
        if folder not in self._processors:
            made = import_transformers().AutoProcessor.from_pretrained(Path(folder))
            self._processors[folder] = made
        return self._processors[folder]

    def prepare(self, folder: str, dtype: str, data: bytes, pixels_max: int) -> PreparedImage:
        """Returns the image in the file `data` for the model in `folder`, with pixels in `dtype`.
        Raises ValueError for a file that is not an image, or a too large one."""
        processor = self.load(folder)
        image = _decoded(data, pixels_max)
        # As transformers loads it, so that the answers are the same.
        inputs = processor(
            text=[processor.image_token],
            images=[image],
            add_special_tokens=False,
            return_mm_token_type_ids=False,
            return_tensors="pt",
        )
        # Llama 4's processor makes bfloat16, which numpy does not have.
        pixels = {"pixel_values": _tensor(inputs["pixel_values"].float().numpy(), dtype)}
        sizes = {name: _tensor(inputs[name].numpy(), "int64") for name in _SIZES if name in inputs}
        tensors: Tensors = pixels | sizes
        digest = blake2b(msgspec.msgpack.encode(tensors), digest_size=32).hexdigest()
        return PreparedImage(digest, inputs["input_ids"][0].tolist(), tensors)


def _decoded(data: bytes, pixels_max: int) -> Any:
    """Returns the picture, of which the sizes are checked before its pixels are read."""
    from PIL import Image, ImageOps

    Image.MAX_IMAGE_PIXELS = None  # checked here
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > pixels_max:
                raise ValueError(
                    f"has {width} x {height} pixels; at most {pixels_max} are allowed"
                    " (frontend.images.pixels_max)"
                )
            return ImageOps.exif_transpose(image).convert("RGB")
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"is not a readable {', '.join(FORMATS)} file") from error


def _tensor(values: NDArray[Any], dtype: str) -> Tensor:
    bits = _bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)
    return Tensor(dtype, tuple(values.shape), np.ascontiguousarray(bits).tobytes())


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Returns the bits of the nearest bfloat16, of which numpy does not have the type."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
