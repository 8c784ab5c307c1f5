"""Virtual tensors: address space that is backed by pages on request (Prism, Table 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kvcached._core as _core
from kvcached._core import TensorView
from kvcached.checks import checked, each, not_negative, positive, text
from kvcached.errors import InvalidArgumentError


class VirtualTensor:
    """Reserved address space whose pages the caller maps and unmaps.

    Made by `Client.alloc_virtual_tensor`. Exports itself through DLPack as one dimension of uint8,
    and as any other shape and type with `view`. Access to an unmapped page is a SIGSEGV.
    """

    def __init__(self, client: _core.Client, size_bytes: int) -> None:
        self._client = client
        self._core = _core.VirtualTensor.create(client, size_bytes)

    def __repr__(self) -> str:
        return f"VirtualTensor({self.size_bytes} bytes, {self.mapped_bytes} mapped)"

    @property
    def size_bytes(self) -> int:
        """Bytes of address space."""
        return self._core.size_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes that are backed by pages."""
        return self._core.mapped_bytes

    @checked(offset_bytes=not_negative, size_bytes=positive)
    def map(self, offset_bytes: int, size_bytes: int) -> None:
        """Maps pages to a range; all or nothing.

        Raises NoRoomError, AlreadyMappedError, AlignmentError, InvalidArgumentError.
        """
        self._core.map(offset_bytes, size_bytes)

    @checked(offset_bytes=not_negative, size_bytes=positive)
    def unmap(self, offset_bytes: int, size_bytes: int) -> None:
        """Returns the pages of a range to the device; all or nothing.

        Raises NotMappedError, AlignmentError, InvalidArgumentError.
        """
        self._core.unmap(offset_bytes, size_bytes)

    @checked(shape=each(positive), dtype=text, offset_bytes=not_negative)
    def view(self, shape: Sequence[int], dtype: str, offset_bytes: int = 0) -> TensorView:
        """Returns a dense view for `torch.from_dlpack` or `numpy.from_dlpack`.

        The view keeps the address range reserved while it exists, but not the pages.
        """
        if not shape:
            raise InvalidArgumentError("shape is empty; a view has at least one dimension")
        return self._core.view(offset_bytes, list(shape), dtype)

    def __dlpack__(self, **options: Any) -> object:
        return self.view([self.size_bytes], "uint8").__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.view([self.size_bytes], "uint8").__dlpack_device__()

    def _free(self) -> None:
        self._core.close()
