"""Tensors of blocks in which the engine itself arranges the layers (`PackedLayout`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvcached.kvcache import KVCache


class ServedZeros(TorchFunctionMode):  # type: ignore[misc]
    """Makes `torch.zeros`, with which engines allocate their KV cache, return `tensor`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.zeros:
            return func(*args, **kwargs or {})
        return self._tensor


def packed_tensor(kv: KVCache) -> torch.Tensor:
    """Returns the cache's bytes by block, of which the engine makes its own views."""
    return torch.from_dlpack(kv.blocks(0, "packed"))


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of an engine's module within the context."""
    stock = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, stock)
