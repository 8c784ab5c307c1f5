"""Safetensors or GGUF files on disk: headers, checked before any tensor is read.

Safetensors (https://github.com/huggingface/safetensors) have 8 bytes of header length, little
endian; a JSON object of tensors with dtype, shape and offsets into the rest; the rest, without
holes. GGUF: `gguf_file.py`.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcached.checks import by_name, checked, instance_of
from kvcached.checks import path as path_rule
from kvcached.errors import InvalidArgumentError, WeightFileError
from kvcached.weights import gguf_file
from kvcached.weights.spec import CheckpointTensor, TensorSpec, check_specs

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_LENGTH_BYTES = 8
_HEADER_BYTES_MAX = 100_000_000  # as in the reference implementation
_INDEX = "model.safetensors.index.json"
# Files that model folders have besides: Mistral's own format, and an adapter in PEFT's.
_NOT_WEIGHTS = re.compile(r"consolidated.*\.safetensors|adapter_model\.safetensors")
# GGUF files of vision towers, next to those of language models.
_VISION = re.compile(r"mmproj.*")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Files of a model, and their tensors by name."""

    files: tuple[Path, ...]
    tensors: Mapping[str, CheckpointTensor]

    @classmethod
    @checked(path=path_rule, expected=by_name(instance_of(TensorSpec)))
    def open(
        cls, path: str | Path, *, expected: Mapping[str, TensorSpec] | None = None
    ) -> Checkpoint:
        """Reads the headers of one file, or of a directory's files.

        A directory's index lists the model's files. Without an index it is all *.safetensors, but
        for copies in another format and LoRA adapters, and without those its only *.gguf.
        Raises WeightFileError with the file if one is missing, cut short or damaged,
        WeightMismatchError if the tensors are not `expected`.
        """
        try:
            files = _files_of(Path(path))
        except OSError as error:
            raise WeightFileError(f"{path}: {error.strerror}") from error
        tensors: dict[str, CheckpointTensor] = {}
        for file in files:
            for tensor in _read_header(file):
                if tensor.name in tensors:
                    first = tensors[tensor.name].path
                    raise WeightFileError(f"{file}: tensor {tensor.name} is in {first} as well")
                tensors[tensor.name] = tensor
        checkpoint = cls(files, tensors)
        if expected is not None:
            check_specs(str(path), checkpoint.specs, expected)
        return checkpoint

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Type and shape of each tensor."""
        return {name: tensor.spec for name, tensor in self.tensors.items()}

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.spec.size_bytes for tensor in self.tensors.values())


def _files_of(path: Path) -> tuple[Path, ...]:
    if path.is_file():
        return (path,)
    if not path.is_dir():
        raise InvalidArgumentError(f"{path} is neither a file nor a directory")
    index = path / _INDEX
    if index.exists():
        return tuple(path / name for name in _indexed(index))
    found = sorted(path.glob("*.safetensors"))
    files = tuple(file for file in found if not _NOT_WEIGHTS.fullmatch(file.name))
    return files or (_gguf_of(path),)


def _gguf_of(path: Path) -> Path:
    found = sorted(path.glob(f"*{gguf_file.SUFFIX}"))
    files = [file for file in found if not _VISION.fullmatch(file.name)]
    if not files:
        raise WeightFileError(
            f"{path} does not have *.safetensors; save the weights in that format"
        )
    if len(files) > 1:
        raise WeightFileError(
            f"{path} has {files[0].name} and {len(files) - 1} more *.gguf; give the path of one of"
            " them"
        )
    return files[0]


def _indexed(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        return sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightFileError(f"{index} is damaged ({error}); download it again") from error


def _read_header(path: Path) -> Iterator[CheckpointTensor]:
    if path.suffix == gguf_file.SUFFIX:
        yield from gguf_file.read_header(path).tensors
        return
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(_LENGTH_BYTES)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == _LENGTH_BYTES else size_bytes
            begin = _LENGTH_BYTES + length
            if length > _HEADER_BYTES_MAX or begin > size_bytes:
                raise _damaged(path, "its header does not fit into the file")
            header = json.loads(file.read(length))
    except OSError as error:
        raise WeightFileError(f"{path}: {error.strerror}; download it again") from error
    except ValueError as error:
        raise _damaged(path, f"its header is not valid JSON: {error}") from error
    yield from _tensors(path, header, begin, size_bytes)


def _tensors(path: Path, header: Any, begin: int, size_bytes: int) -> Iterator[CheckpointTensor]:
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    found = [
        _tensor(path, name, entry, begin) for name, entry in header.items() if name[:2] != "__"
    ]
    end = begin
    for tensor in sorted(found, key=lambda tensor: (tensor.offset_bytes, tensor.spec.size_bytes)):
        if tensor.offset_bytes != end:
            raise _damaged(path, f"tensor {tensor.name} does not begin where the last one ends")
        end += tensor.spec.size_bytes
    if end != size_bytes:
        raise _damaged(path, f"it has {size_bytes} bytes, but its header describes {end}")
    yield from found


def _tensor(path: Path, name: str, entry: Any, begin: int) -> CheckpointTensor:
    try:
        first, last = entry["data_offsets"]
        spec = TensorSpec(_DTYPES[entry["dtype"]], tuple(entry["shape"]))
        tensor = CheckpointTensor(name, spec, path, begin + first)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"tensor {name}: {error}") from error
    if first < 0 or last - first != spec.size_bytes:
        raise _damaged(path, f"tensor {name} is {spec} but takes {last - first} bytes")
    return tensor


def _damaged(path: Path, reason: str) -> WeightFileError:
    return WeightFileError(f"{path} is damaged or not complete: {reason}; download it again")
