"""Memory of one model's weights on the device: arenas of kvcached that can be replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

import kvcached
from kvcached import TensorSpec, WeightArena, WeightLayout
from kvcached.weights.spec import DTYPE_BYTES
from prism.engines.weights.tensor_slots import extent_of

OWN = "prism."  # begin of the names of tensors that are not the model's


class WeightPages:
    """Tensors in mapped pages, all of which are leased. Thread rule: the engine's thread only."""

    def __init__(self, client: kvcached.Client, model: str) -> None:
        self._client = client
        self._model = model
        self.arenas: list[WeightArena] = []

    def add(self, specs: Mapping[str, TensorSpec]) -> None:
        """Leases an arena of the exact size of these tensors, and assigns addresses in their order.
        Raises NoRoomError."""
        self.arenas.append(self._client.alloc_weights(WeightLayout.of(specs), self._model))

    def replace(self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> None:
        """Frees the arenas of these names, then adds and maps one for the tensors. Raises
        NoRoomError. REQUIRES: no tensor over the freed arenas is used any more."""
        for arena in {id(arena): arena for arena in map(self.arena_of, names)}.values():
            self.arenas.remove(arena)
            arena.free()
        if tensors:
            self.add(specs_of(tensors))
            self.arenas[-1].back()

    def fill(self) -> None:
        """Maps every page for the engine's loaders. Raises NoRoomError.

        Fills all bytes with a pattern that is not a valid weight, by which `unwritten` finds
        tensors that were not written.
        """
        for arena in self.arenas:
            arena.fill()

    def unwritten(self) -> tuple[str, ...]:
        """Returns the tensors that were not written since `fill`. REQUIRES: all writes are done."""
        return tuple(name for arena in self.arenas for name in arena.unwritten())

    def free(self) -> None:
        """Returns all memory. Idempotent. REQUIRES: no tensor over the pages is used any more."""
        for arena in self.arenas:
            arena.free()
        self.arenas.clear()

    @property
    def size_bytes(self) -> int:
        """Bytes of the leases."""
        return sum(arena.size_bytes for arena in self.arenas)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Types and shapes of the model's tensors."""
        found = (item for arena in self.arenas for item in arena.layout.specs.items())
        return {name: spec for name, spec in found if not name.startswith(OWN)}

    @property
    def device(self) -> torch.device:
        """Device of the pages."""
        [arena, *_] = self.arenas
        return self.bytes_of(next(iter(arena))).device

    def arena_of(self, name: str) -> WeightArena:
        """Returns the arena of a tensor, the last one for a tensor that was added again."""
        for arena in reversed(self.arenas):
            if name in arena.layout.specs:
                return arena
        raise RuntimeError(f"{name} is not laid out")

    def bytes_of(self, name: str) -> torch.Tensor:
        """Returns the bytes of a tensor."""
        arena = self.arena_of(name)
        return torch.from_dlpack(arena.view(name, "uint8", (arena.layout.specs[name].size_bytes,)))

    def __getitem__(self, name: str) -> torch.Tensor:
        spec = self.arena_of(name).layout.specs[name]
        return self.bytes_of(name).view(getattr(torch, spec.dtype)).view(spec.shape)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether the tensor's memory is in the pages."""
        if tensor.is_meta or tensor.numel() == 0:
            return not tensor.is_meta
        start, end = extent_of(tensor)
        ranges = (arena.address_range() for arena in self.arenas)
        return any(first <= start and end <= last for first, last in ranges)

    def checksum(self) -> int:
        """Returns a number that changes when any of the model's tensors does."""
        return sum(_sum(self.bytes_of(name)) * (i + 1) for i, name in enumerate(self.specs))


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Returns the specs of tensors in an arena, where types that kvcached does not know are
    bytes."""
    return {name: _spec_of(tensor) for name, tensor in tensors.items()}


def _spec_of(tensor: torch.Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype in DTYPE_BYTES:
        return TensorSpec(dtype, tuple(tensor.shape))
    return TensorSpec("uint8", (tensor.nbytes,))


def _sum(content: torch.Tensor) -> int:
    widest = torch.int32 if len(content) % 4 == 0 else torch.uint8
    return int(content.view(widest).sum(dtype=torch.int64))
