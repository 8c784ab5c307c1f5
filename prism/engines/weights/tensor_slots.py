"""Tensors of a loaded model: where they are attached, and the memory that they take.

Quantisation methods keep tensors in modules and in objects of modules (kernels, schemes). Several
tensors may share memory: a transposed view, an alias.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

_MODULE_FIELDS = frozenset(vars(nn.Module()))
# Packages whose objects do not hold an engine's tensors.
_FOREIGN = sys.stdlib_module_names | {"torch", "transformers", "numpy", "triton"}
_NOT_HOLDERS = (
    nn.Module,
    torch.Tensor,
    type,
    Enum,
    functools.partial,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
)


@dataclass(frozen=True, slots=True)
class Slot:
    """Attribute of a module, or of an object that a module holds."""

    path: str  # of the holder
    place: str  # key of `places`
    name: str

    @property
    def full_name(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


def holders(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the roots and the objects that they hold, by path, without modules of modules: for a
    whole model pass all of `named_modules`."""
    found = dict(roots)
    seen = {id(holder) for holder in found.values()}
    queue = deque(found.items())
    while queue:
        path, holder = queue.popleft()
        for name, value in places(holder)["attribute"].items():
            if id(value) not in seen and _is_holder(value):
                seen.add(id(value))
                inner = f"{path}.{name}" if path else name
                found[inner] = value
                queue.append((inner, value))
    return found


def _is_holder(value: Any) -> bool:
    if isinstance(value, _NOT_HOLDERS) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _FOREIGN


def places(holder: Any) -> dict[str, dict[str, Any]]:
    """Returns the attributes of a holder by kind. The dictionaries are its own, but for that of a
    module's plain attributes, which lacks torch's."""
    if not isinstance(holder, nn.Module):
        return {"attribute": vars(holder)}
    plain = {name: value for name, value in vars(holder).items() if name not in _MODULE_FIELDS}
    return {
        "attribute": plain,
        "parameter": holder._parameters,
        "buffer": holder._buffers,
        "module": holder._modules,
    }


def attributes(found: Mapping[str, Any]) -> Iterator[tuple[Slot, Any]]:
    """Yields all attributes of the holders."""
    for path, holder in found.items():
        for place, values in places(holder).items():
            for name, value in values.items():
                yield Slot(path, place, name), value


def tensors(found: Mapping[str, Any]) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Yields the attributes of the holders that are tensors."""
    for slot, value in attributes(found):
        if isinstance(value, torch.Tensor):
            yield slot, value


def attach(found: Mapping[str, Any], slot: Slot, value: Any) -> None:
    """Sets an attribute, as it is found by `attributes`."""
    holder = found[slot.path]
    values = vars(holder) if slot.place == "attribute" else places(holder)[slot.place]
    values[slot.name] = value


def detach(found: Mapping[str, Any], slot: Slot) -> None:
    """Removes an attribute."""
    holder = found[slot.path]
    values = vars(holder) if slot.place == "attribute" else places(holder)[slot.place]
    del values[slot.name]


# --- memory ----------------------------------------------------------------------------------


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first address of a tensor's elements, and that after the last."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


@dataclass(frozen=True, slots=True)
class View:
    """Tensor over a part of a block."""

    tensor: torch.Tensor
    offset_bytes: int
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(slots=True)
class Block:
    """Memory of one tensor, or of several that overlap."""

    name: str  # of the first tensor's slot
    start: int
    end: int
    views: list[View]

    @property
    def size_bytes(self) -> int:
        return self.end - self.start

    @property
    def first(self) -> torch.Tensor:
        return self.views[0].tensor

    def add(self, tensor: torch.Tensor) -> None:
        """Adds a tensor that starts in the block."""
        start, end = extent_of(tensor)
        self.end = max(self.end, end)
        self.views.append(View(tensor, start - self.start, tensor.shape, tensor.stride()))

    def shape(self) -> torch.Tensor:
        """Returns a meta tensor of the block's memory: of the tensor's own type and shape if it is
        one contiguous tensor, otherwise of bytes."""
        if len(self.views) == 1 and self.first.is_contiguous():
            return torch.empty(self.first.shape, dtype=self.first.dtype, device="meta")
        return torch.empty(self.size_bytes, dtype=torch.uint8, device="meta")

    def content(self) -> torch.Tensor:
        """Returns the block's bytes, without a copy."""
        flat = torch.empty(0, dtype=torch.uint8, device=self.first.device)
        if self.size_bytes == 0:
            return flat
        # The tensors overlap, so each one's storage has all of the block.
        storage = self.first.untyped_storage()
        return flat.set_(storage, self.start - storage.data_ptr(), (self.size_bytes,), (1,))

    def forget(self) -> None:
        """Drops the memory until `move`."""
        for view in self.views:
            view.tensor.data = view.tensor.new_empty(0)

    def move(self, target: torch.Tensor) -> None:
        """Makes the tensors views of `target`, which has the block's bytes."""
        for view in self.views:
            dtype = view.tensor.dtype
            view.tensor.data = view_at(target, view.offset_bytes, dtype, view.shape, view.stride)


def view_at(
    target: torch.Tensor,
    offset_bytes: int,
    dtype: torch.dtype,
    shape: Iterable[int],
    stride: Iterable[int],
) -> torch.Tensor:
    """Returns a tensor of this type, shape and strides over the bytes of `target`."""
    rest = target[offset_bytes:]
    whole = rest[: len(rest) // dtype.itemsize * dtype.itemsize]
    return whole.view(dtype).as_strided(tuple(shape), tuple(stride))


def blocks_of(found: Iterable[tuple[Slot, torch.Tensor]]) -> list[Block]:
    """Returns the memory of these tensors, each byte once, by rising addresses. Each tensor without
    elements has a separate block."""
    names: dict[int, tuple[str, torch.Tensor]] = {}
    for slot, tensor in found:
        names.setdefault(id(tensor), (slot.full_name, tensor))
    ordered = sorted(names.values(), key=lambda pair: (pair[1].numel() == 0, extent_of(pair[1])))
    blocks: list[Block] = []
    for name, tensor in ordered:
        start, end = extent_of(tensor)
        if not blocks or start >= blocks[-1].end or start == end:
            blocks.append(Block(name, start, end, []))
        blocks[-1].add(tensor)
    return blocks
