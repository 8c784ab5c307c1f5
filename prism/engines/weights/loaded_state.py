"""Differences that loading made to a built model: tensors as the engine left them after it
repacked, fused or derived them, and plain values next to them.

A first load compares the model with its state before the load. The difference is stored with the
weights, and a later load applies it to a freshly built model instead of processing weights again. A
difference that cannot be described, such as a new object, is not stored: the model is then always
loaded from its files. What an engine keeps outside of the model is not seen.
"""

from __future__ import annotations

import hashlib
import importlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from kvcached.errors import WeightFileError, WeightMismatchError
from prism.engines.weights.tensor_slots import (
    Block,
    Slot,
    attach,
    attributes,
    detach,
    holders,
    tensors,
    view_at,
)

_PLAIN = (bool, int, float, str)
_LOADERS = ("weight_loader", "_weight_loader")  # used by loads alone


class NotDescribedError(Exception):
    """A change of a model that cannot be described. The text says where it is."""


@dataclass(frozen=True, slots=True)
class _Opaque:
    """Value of which only the identity is known."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Opaque) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def whole(model: nn.Module) -> dict[str, Any]:
    """Returns all holders of a model."""
    return holders(dict(model.named_modules()))


class BuiltModel:
    """State of a model before its weights are loaded, with copies of the tensors that are not
    parameters (rotary tables, masks)."""

    def __init__(self, model: nn.Module) -> None:
        found = whole(model)
        self.digest = _digest(found)
        self.values = {slot: _frozen(value) for slot, value in attributes(found)}
        slots = list(tensors(found))
        self._tensors = [tensor for _, tensor in slots]  # kept, so that no id is used again
        self._slots = {id(tensor): slot for slot, tensor in reversed(slots)}
        self._marks = {id(tensor): _marks(tensor) for tensor in self._tensors}
        self._parameters = {(s, id(t)) for s, t in slots if isinstance(t, nn.Parameter)}
        self._copies = {id(t): t.clone() for _, t in slots if not isinstance(t, nn.Parameter)}

    def slot_of(self, tensor: torch.Tensor) -> Slot | None:
        """Returns the first slot of a tensor that was built, None for another tensor."""
        return self._slots.get(id(tensor))

    def marks_of(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Returns the attributes that a tensor had."""
        return self._marks.get(id(tensor), {})

    def makes(self, tensor: torch.Tensor) -> bool:
        """Returns whether another build makes the tensor as it is now."""
        copy = self._copies.get(id(tensor))
        return (
            copy is not None
            and (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
            and torch.equal(_bytes_of(copy), _bytes_of(tensor))
        )

    def loaded(
        self, found: Mapping[str, Any], device: torch.device | None = None
    ) -> list[tuple[Slot, torch.Tensor]]:
        """Returns the tensors of these holders that no build makes: parameters, and what loading
        changed or created; with `device`, those on it."""
        return [
            (slot, tensor)
            for slot, tensor in tensors(found)
            if (device is None or tensor.device.type == device.type) and not self.makes(tensor)
        ]

    def has_same_tensors(self, model: nn.Module) -> bool:
        """Returns whether the model has the same parameters as before, and nothing was loaded
        besides. Contents of parameters are not compared."""
        return {(slot, id(tensor)) for slot, tensor in self.loaded(whole(model))} == (
            self._parameters
        )


@dataclass(frozen=True, slots=True)
class LoadedTensor:
    """View of a block, as loading left it."""

    block: str
    offset_bytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    kind: str  # class, as "module:name"
    marks: dict[str, Any]  # attributes that loading set
    built: Slot | None  # of the built tensor that it still is
    slots: list[Slot]


@dataclass(frozen=True, slots=True)
class LoadedState:
    """Description of a loaded model."""

    digest: str  # of the built model
    blocks: dict[str, tuple[str, tuple[int, ...]]]  # type and shape
    tensors: list[LoadedTensor]
    removed: list[Slot]
    values: list[tuple[Slot, Any]]

    @classmethod
    def of(cls, model: nn.Module, built: BuiltModel, blocks: list[Block]) -> LoadedState:
        """Describes the model. `blocks` have its loaded tensors. Raises NotDescribedError."""
        found = whole(model)
        now = dict(attributes(found))
        return cls(
            digest=built.digest,
            blocks={block.name: _spec_of(block.shape()) for block in blocks},
            tensors=list(_described(blocks, built.loaded(found), built)),
            removed=[slot for slot in built.values if slot not in now and slot.path in found],
            values=list(_changed(built.values, now)),
        )

    def to_bytes(self) -> bytes:
        """Returns the description for `from_bytes`."""
        return zlib.compress(msgspec.msgpack.encode(self))

    @classmethod
    def from_bytes(cls, content: bytes) -> LoadedState:
        """Returns a stored description. Raises WeightFileError if it is damaged."""
        try:
            return msgspec.msgpack.decode(zlib.decompress(content), type=cls)
        except (msgspec.DecodeError, zlib.error) as error:
            raise WeightFileError(f"the stored state of a model is damaged: {error}") from error

    def memory(self) -> dict[str, torch.Tensor]:
        """Returns a meta tensor for each block."""
        return {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, (dtype, shape) in self.blocks.items()
        }

    def apply(self, model: nn.Module, blocks: Mapping[str, torch.Tensor]) -> None:
        """Makes a built model the loaded one, with tensors over the bytes of `blocks`. Raises
        WeightMismatchError for a model that was built otherwise."""
        found = whole(model)
        if _digest(found) != self.digest:
            raise WeightMismatchError("the stored weights are of a model that is built otherwise")
        built = dict(tensors(found))
        ready = [(each, _restored(each, built, blocks[each.block])) for each in self.tensors]
        for slot in self.removed:
            detach(found, slot)
        for slot, value in self.values:
            attach(found, slot, _thawed(value))
        for each, tensor in ready:
            for slot in each.slots:
                attach(found, slot, tensor)


def materialise(built: torch.Tensor, target: torch.Tensor) -> None:
    """Gives memory to a parameter, which stays the same object with its class and its attributes
    (weight loaders)."""
    real = nn.Parameter(target, requires_grad=False)
    real.__class__ = built.__class__
    real.__dict__.update(built.__dict__)
    torch.utils.swap_tensors(built, real)


# --- tensors ---------------------------------------------------------------------------------


def _described(
    blocks: list[Block], loaded: list[tuple[Slot, torch.Tensor]], built: BuiltModel
) -> Iterator[LoadedTensor]:
    slots: dict[int, list[Slot]] = {}
    for slot, tensor in loaded:
        slots.setdefault(id(tensor), []).append(slot)
    for block in blocks:
        for view in block.views:
            tensor = view.tensor
            own = slots[id(tensor)]
            name, *_ = (slot.full_name for slot in own)
            yield LoadedTensor(
                block=block.name,
                offset_bytes=view.offset_bytes,
                dtype=_name_of(tensor.dtype),
                shape=tuple(view.shape),
                stride=view.stride,
                kind=_kind(tensor, name),
                marks=_changed_marks(tensor, built.marks_of(tensor), name),
                built=built.slot_of(tensor),
                slots=own,
            )


def _restored(
    each: LoadedTensor, built: Mapping[Slot, torch.Tensor], block: torch.Tensor
) -> torch.Tensor:
    dtype, kind = getattr(torch, each.dtype), _class_named(each.kind)
    target = view_at(block, each.offset_bytes, dtype, each.shape, each.stride)
    tensor = built[each.built] if each.built is not None else target
    if not issubclass(kind, nn.Parameter):
        tensor.data = target
    elif each.built is not None:
        materialise(tensor, target)
    else:
        tensor = nn.Parameter(target, requires_grad=False)
        tensor.__class__ = kind
    for name, value in each.marks.items():
        setattr(tensor, name, _thawed(value))
    return tensor


def _kind(tensor: torch.Tensor, name: str) -> str:
    kind = f"{type(tensor).__module__}:{type(tensor).__qualname__}"
    if _class_named(kind) is not type(tensor):
        raise NotDescribedError(f"{name} has the class {kind}, which cannot be imported")
    return kind


def _class_named(kind: str) -> Any:
    module, _, name = kind.partition(":")
    return getattr(importlib.import_module(module), name, None)


def _marks(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns the attributes of a tensor that are not for loads alone."""
    own: dict[str, Any] = getattr(tensor, "__dict__", {})
    return {name: _frozen(value) for name, value in own.items() if name not in _LOADERS}


def _changed_marks(tensor: torch.Tensor, before: dict[str, Any], name: str) -> dict[str, Any]:
    now = _marks(tensor)
    changed = {n: v for n, v in now.items() if n not in before or not _equal(before[n], v)}
    for mark, value in changed.items():
        if isinstance(value, _Opaque):
            raise NotDescribedError(f"{name} has the attribute {mark}")
    return changed


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


# --- other attributes ------------------------------------------------------------------------


def _changed(before: Mapping[Slot, Any], now: Mapping[Slot, Any]) -> Iterator[tuple[Slot, Any]]:
    """Yields the attributes with another value than before, except tensors."""
    for slot, value in now.items():
        frozen = _frozen(value)
        if isinstance(value, torch.Tensor) or (slot in before and _equal(before[slot], frozen)):
            continue
        if isinstance(frozen, _Opaque):
            raise NotDescribedError(f"{slot.full_name} is another {type(value).__name__}")
        yield slot, frozen


def _digest(found: Mapping[str, Any]) -> str:
    """Returns a hash of the holders' classes, the names of modules' attributes, and the types and
    shapes of tensors."""
    lines = [f"{path} {type(holder).__qualname__}" for path, holder in found.items()]
    for slot, value in attributes(found):
        if isinstance(value, torch.Tensor):
            lines.append(f"{slot} {value.dtype} {tuple(value.shape)}")
        elif isinstance(found[slot.path], nn.Module):
            lines.append(str(slot))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _frozen(value: Any) -> Any:
    """Returns a copy of a plain value that can be stored. Other values are opaque."""
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": _name_of(value)}
    if type(value) in (list, tuple):
        parts = [_frozen(part) for part in value]
        return _Opaque(value) if _has_opaque(parts) else {type(value).__name__: parts}
    if type(value) is dict and all(type(key) is str for key in value):
        named = {key: _frozen(part) for key, part in value.items()}
        return _Opaque(value) if _has_opaque(list(named.values())) else {"dict": named}
    return _Opaque(value)


def _has_opaque(values: list[Any]) -> bool:
    return any(isinstance(value, _Opaque) for value in values)


def _thawed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "dict":
        return {key: _thawed(part) for key, part in content.items()}
    return {"list": list, "tuple": tuple}[kind](_thawed(part) for part in content)


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _spec_of(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return _name_of(tensor.dtype), tuple(tensor.shape)
