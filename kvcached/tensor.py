"""Virtual tensors: address space now, memory when mapped (Prism, Table 3)."""

from __future__ import annotations

from collections.abc import Sequence

from kvcached import _core
from kvcached._core import TensorView
from kvcached.checks import not_negative, positive
from kvcached.errors import InvalidArgumentError


class VirtualTensor:
    """Reserved address space whose pages are mapped and unmapped by hand.

    Made by `Client.alloc_virtual_tensor`. Exports itself through DLPack as one dimension of uint8,
    and as any other shape and type with `view`. Touching an unmapped page is a SIGSEGV.
    """

    def __init__(self, core: _core.VirtualTensor) -> None:
        self._core = core

    @property
    def size_bytes(self) -> int:
        """Bytes of address space."""
        return self._core.size_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes that are backed by pages."""
        return self._core.mapped_bytes

    def map(self, offset_bytes: int, size_bytes: int) -> None:
        """Backs a range with pages; all or nothing.

        Raises NoRoomError, AlreadyMappedError, AlignmentError, InvalidArgumentError.
        """
        not_negative("offset_bytes", offset_bytes)
        self._core.map(offset_bytes, positive("size_bytes", size_bytes))

    def unmap(self, offset_bytes: int, size_bytes: int) -> None:
        """Gives the pages of a range back to the device; all or nothing.

        Raises NotMappedError, AlignmentError, InvalidArgumentError.
        """
        not_negative("offset_bytes", offset_bytes)
        self._core.unmap(offset_bytes, positive("size_bytes", size_bytes))

    def view(self, shape: Sequence[int], dtype: str, offset_bytes: int = 0) -> TensorView:
        """A dense view for `torch.from_dlpack` or `numpy.from_dlpack`.

        It keeps the address range reserved for as long as it lives, not the pages.
        """
        extents = [positive("shape", extent) for extent in shape]
        if not extents:
            raise InvalidArgumentError("shape is empty; a view has one extent at least")
        return self._core.view(not_negative("offset_bytes", offset_bytes), extents, dtype)

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        return self.view([self.size_bytes], "uint8").__dlpack__(
            stream=stream, max_version=max_version, dl_device=dl_device, copy=copy
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.view([self.size_bytes], "uint8").__dlpack_device__()

    def _free(self) -> None:
        self._core.close()
