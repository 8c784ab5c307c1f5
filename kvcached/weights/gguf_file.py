"""Header of a GGUF file: metadata and tensors, checked before any tensor is read.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little endian: magic,
version, numbers of tensors and of keys; keys with their values; tensors with dimensions, type and
offset into the rest, which begins at a multiple of the alignment.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcached.errors import WeightFileError
from kvcached.weights.spec import CheckpointTensor, TensorSpec

MAGIC = b"GGUF"
SUFFIX = ".gguf"
# Types of ggml by their numbers: the name, and the numbers and bytes of a block.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
}
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_ALIGNMENT_BYTES = 32
_DIMS_MAX = 4  # as in ggml
_STRING, _ARRAY = 8, 9
# Formats of values by the numbers of their types.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"} | {
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Header of one file."""

    # Values by key, without arrays.
    metadata: dict[str, Any]
    tensors: tuple[CheckpointTensor, ...]
    # Bytes before the first tensor.
    size_bytes: int


def read_header(path: Path) -> GgufHeader:
    """Reads the header. Raises WeightFileError if the file is missing, damaged, a part of a split
    model, or has tensors of unknown types."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except OSError as error:
        raise WeightFileError(f"{path}: {error.strerror}; download it again") from error
    except (ValueError, struct.error) as error:  # also of mmap, for an empty file
        raise _damaged(path, str(error)) from error


class _Reader:
    """Cursor in the bytes of a file. Raises ValueError or struct.error for damaged ones."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self) -> GgufHeader:
        if self._bytes(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version:#x}, and 2 and 3 can be read")
        tensors, keys = self._number("Q"), self._number("Q")
        metadata = dict(self._entries(keys))
        if isinstance(parts := metadata.get("split.count"), int) and parts > 1:
            raise WeightFileError(
                f"{self._path} is one of {parts} parts of a model; merge them by llama-gguf-split"
                " --merge"
            )
        found = [self._described() for _ in range(tensors)]
        align = metadata.get(_ALIGNMENT, _ALIGNMENT_BYTES)
        if not isinstance(align, int) or align <= 0:
            raise ValueError(f"its {_ALIGNMENT} is {align}")
        begin = -(-self._at // align) * align
        return GgufHeader(metadata, tuple(self._placed(found, begin)), begin)

    def _entries(self, count: int) -> Iterator[tuple[str, Any]]:
        for _ in range(count):
            key, kind = self._text(), self._number("I")
            if kind == _ARRAY:
                self._skip_array()
            else:
                yield key, self._text() if kind == _STRING else self._number(self._format(kind))

    def _skip_array(self) -> None:
        kind, count = self._number("I"), self._number("Q")
        if kind != _STRING:
            self._bytes(struct.calcsize(self._format(kind)) * count)
            return
        for _ in range(count):
            self._bytes(self._number("Q"))

    def _described(self) -> tuple[str, list[int], int, int]:
        name, dims = self._text(), self._number("I")
        if not 0 < dims <= _DIMS_MAX:
            raise ValueError(f"tensor {name} has {dims} dimensions")
        return name, [self._number("Q") for _ in range(dims)], self._number("I"), self._number("Q")

    def _placed(
        self, found: list[tuple[str, list[int], int, int]], begin: int
    ) -> Iterator[CheckpointTensor]:
        names = set[str]()
        for name, extents, kind, offset in found:
            if kind not in TYPES:
                raise WeightFileError(
                    f"{self._path} has tensor {name} in ggml's type {kind}, which is not known;"
                    " give a file in another type, such as Q4_K_M"
                )
            ggml_type, numbers, size_bytes = TYPES[kind]
            *rows, columns = reversed(extents)
            if columns % numbers:
                raise ValueError(f"tensor {name} has rows of {columns} numbers in {ggml_type}")
            plain = ggml_type in _DTYPES
            last = columns if plain else columns // numbers * size_bytes
            spec = TensorSpec(_DTYPES.get(ggml_type, "uint8"), (*rows, last))
            if name in names:
                raise ValueError(f"tensor {name} is there twice")
            if begin + offset + spec.size_bytes > len(self._data):
                raise ValueError(f"tensor {name} is beyond its end")
            names.add(name)
            shape = () if plain else (*rows, columns)
            yield CheckpointTensor(name, spec, self._path, begin + offset, ggml_type, shape)

    def _format(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"its header has a value of type {kind}")
        return _SCALARS[kind]

    def _number(self, form: str) -> Any:
        [value] = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _text(self) -> str:
        return self._bytes(self._number("Q")).decode()

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise ValueError("its header does not fit into the file")
        self._at += count
        return self._data[self._at - count : self._at]


def _damaged(path: Path, reason: str) -> WeightFileError:
    return WeightFileError(f"{path} is damaged or not complete: {reason}; download it again")
