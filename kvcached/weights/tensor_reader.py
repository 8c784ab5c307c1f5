"""Bytes of tensors on any device: CPU memory directly, a GPU's memory in pieces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import kvcached._core as _core
from kvcached.errors import InvalidArgumentError

PIECE_BYTES = 16 << 20  # pinned memory per GPU
_CUDA = 2  # DLPack's kDLCUDA
_OTHER_DEVICES = {4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 14: "oneAPI"}


@dataclass(frozen=True)
class TensorContent:
    """A tensor's DLPack type, its shape, and its bytes in order.

    A piece is valid until the next one is requested.
    """

    code: int
    bits: int
    shape: tuple[int, ...]
    pieces: Iterator[memoryview]


class TensorReader:
    """Reads DLPack tensors of CPUs and GPUs. Thread rule: any thread; GPU reads are serialized.

    A GPU's content is copied through one buffer of pinned memory of PIECE_BYTES, or of pageable
    memory if none can be pinned. It is made at the first use and kept until `close`. The copies are
    ordered after the work on the stream that the tensor's owner calls current
    (torch.cuda.current_stream): its `__dlpack__` gets the stream of the copies. kvcached's own
    tensors have no stream: synchronise the stream that wrote them first.
    """

    def __init__(self) -> None:
        self._gpus: dict[int, _core.CudaReader] = {}
        self._mutex = threading.RLock()

    @contextmanager
    def open(self, array: Any, what: str, first_bytes: int = PIECE_BYTES) -> Iterator[Any]:
        """Yields a TensorContent. `array` stays alive and unchanged meanwhile.

        `first_bytes` limits the first piece. Raises InvalidArgumentError, with the name `what`,
        unless the array is contiguous and in memory of a CPU or a CUDA device.
        """
        place = _device_of(array, what)
        if place is None:
            content, code, bits, shape = _described(array, what)
            view = content.cast("B")
            yield TensorContent(code, bits, shape, _cut(view, first_bytes))
            return
        with self._mutex:
            reader = self._gpu(place)
            exported = _exported(array, reader.stream, what)
            address, code, bits, shape = _described(exported, what)
            size_bytes = _bytes_of(shape, bits)
            pieces = _copied(reader, address, size_bytes, first_bytes)
            yield TensorContent(code, bits, shape, pieces)

    def _gpu(self, ordinal: int) -> _core.CudaReader:
        if ordinal not in self._gpus:
            self._gpus[ordinal] = _core.CudaReader.open(ordinal, PIECE_BYTES)
        return self._gpus[ordinal]

    def close(self) -> None:
        """Frees the pinned memory."""
        with self._mutex:
            self._gpus.clear()


def _device_of(array: Any, what: str) -> int | None:
    """Returns the number of the tensor's CUDA device, None for CPU memory."""
    if not hasattr(array, "__dlpack_device__"):
        return None  # an object of the buffer protocol
    kind, ordinal = array.__dlpack_device__()
    if kind == _CUDA:
        return int(ordinal)
    if kind in _OTHER_DEVICES:
        raise InvalidArgumentError(
            f"{what} is in {_OTHER_DEVICES[kind]} memory; copy it to the CPU or a CUDA device"
        )
    return None


def _described(array: Any, what: str) -> tuple[Any, int, int, tuple[int, ...]]:
    try:
        return _core.array_content(array)
    except TypeError as error:
        raise InvalidArgumentError(
            f"{what} must be a contiguous array in CPU or CUDA memory, not {type(array)}"
        ) from error


def _exported(array: Any, stream: int, what: str) -> Any:
    try:
        return array.__dlpack__(stream=stream)
    except (BufferError, TypeError) as error:
        raise InvalidArgumentError(f"{what} cannot be exported: {error}") from error


def _bytes_of(shape: tuple[int, ...], bits: int) -> int:
    elements = 1
    for extent in shape:
        elements *= extent
    return elements * bits // 8


def _steps(size_bytes: int, first_bytes: int) -> Iterator[tuple[int, int]]:
    at, step = 0, min(first_bytes, PIECE_BYTES)
    while at < size_bytes:
        yield at, min(at + step, size_bytes)
        at, step = at + step, PIECE_BYTES


def _cut(view: memoryview, first_bytes: int) -> Iterator[memoryview]:
    for at, end in _steps(len(view), first_bytes):
        yield view[at:end]


def _copied(
    reader: _core.CudaReader, address: int, size_bytes: int, first_bytes: int
) -> Iterator[memoryview]:
    for at, end in _steps(size_bytes, first_bytes):
        yield reader.read(address + at, end - at)


def read_bytes(array: Any) -> bytes:
    """Returns the content of one contiguous tensor of a CPU or a CUDA device."""
    reader = TensorReader()
    try:
        with reader.open(array, "the tensor") as content:
            return b"".join(bytes(piece) for piece in content.pieces)
    finally:
        reader.close()
