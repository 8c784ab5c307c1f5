"""A model's weights in kvcached pages: charged to the ledger, mapped when the model is laid out.

The weights have a client of their own beside the engine's: an engine's limit and minimum are about
its KV memory, which comes and goes, while weights stay as long as their model is active.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import kvcached

CLIENT_SUFFIX = ".weights"
ALIGNMENT_BYTES = 256


class WeightSpace:
    """Thread rule: the engine's thread only. Every method may raise NoRoomError."""

    def __init__(self, client: kvcached.Client) -> None:
        self._client = client
        self._space: kvcached.VirtualTensor | None = None
        self._bytes: torch.Tensor | None = None
        self._used_bytes = 0

    def reserve(self, size_bytes: int) -> None:
        """Hold room for weights of about this size, so that nobody takes it meanwhile."""
        self._client.set_min(aligned(size_bytes, self._client.page_bytes))

    def map(self, size_bytes: int) -> None:
        """Back exactly `size_bytes` (whole pages of them) with memory. What was reserved beyond
        that is free for others again. The pages are zero."""
        size_bytes = aligned(size_bytes, self._client.page_bytes)
        self._client.set_min(size_bytes)
        self._space = self._client.alloc_virtual_tensor(size_bytes)
        self._space.map(0, size_bytes)
        self._bytes = torch.from_dlpack(self._space)

    @property
    def mapped_bytes(self) -> int:
        return self._space.mapped_bytes if self._space else 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor of this shape and type. REQUIRES: `map`ped for all that is taken."""
        size_bytes = tensor_bytes(like)
        start = self._used_bytes
        self._used_bytes += aligned(size_bytes)
        if self._bytes is None or start + size_bytes > len(self._bytes):
            raise RuntimeError(f"{size_bytes} bytes of weights more than were laid out")
        return self._bytes[start : start + size_bytes].view(like.dtype).view(like.shape)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether all of the tensor's memory lies in this space."""
        if self._bytes is None or tensor.is_meta:
            return False
        offset = int(tensor.data_ptr()) - int(self._bytes.data_ptr())
        return 0 <= offset <= len(self._bytes) - tensor_bytes(tensor)

    def release(self) -> None:
        """Give every page back. REQUIRES: no tensor over the space is used any more. Idempotent."""
        self._bytes, self._used_bytes = None, 0
        if self._space is not None:
            self._client.free_virtual_tensor(self._space)
            self._space = None
        self._client.set_min(0)


def space_for(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that `take` needs for all of these."""
    return sum(aligned(tensor_bytes(t)) for t in tensors)


def tensor_bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def aligned(size_bytes: int, to_bytes: int = ALIGNMENT_BYTES) -> int:
    return -(-size_bytes // to_bytes) * to_bytes
