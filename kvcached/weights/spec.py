"""Plain data: types and shapes of tensors, and their positions in a file or an arena."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from kvcached.checks import by_name, checked, each, instance_of, not_negative, positive, text
from kvcached.errors import InvalidArgumentError, WeightMismatchError

DTYPE_BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"), 1),
}
ALIGNMENT_BYTES = 256  # assumed by kernels' widest loads and torch's allocator


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Type and shape of a dense row-major tensor. An extent may be 0; a scalar's shape is empty."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if text("dtype", self.dtype) not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise InvalidArgumentError(f"dtype {self.dtype!r} is not supported; use one of {known}")
        object.__setattr__(self, "shape", tuple(each(not_negative)("shape", self.shape)))
        not_negative("the tensor's size", self.size_bytes)

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Position of a tensor's bytes."""

    name: str
    spec: TensorSpec
    path: Path
    offset_bytes: int
    # Type in a GGUF file, such as Q4_K, "" in safetensors.
    ggml_type: str = ""
    # Numbers in each dimension if `spec` has the bytes of quantized blocks, otherwise empty.
    numbers: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers in each dimension."""
        return self.numbers or self.spec.shape


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Position of each tensor of a model in its arena."""

    specs: Mapping[str, TensorSpec]
    offsets_bytes: Mapping[str, int]
    size_bytes: int

    @classmethod
    @checked(specs=by_name(instance_of(TensorSpec)), alignment_bytes=positive)
    def of(
        cls, specs: Mapping[str, TensorSpec], *, alignment_bytes: int = ALIGNMENT_BYTES
    ) -> WeightLayout:
        """Lays out `specs` in their order, each tensor at a multiple of `alignment_bytes`."""
        if not specs:
            raise InvalidArgumentError("specs is empty; a weight layout has at least one tensor")
        offsets, end = {}, 0
        for name, spec in specs.items():
            offsets[name] = -(-end // alignment_bytes) * alignment_bytes
            end = offsets[name] + spec.size_bytes
        return cls(dict(specs), offsets, max(end, 1))


def check_specs(
    what: str, found: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec]
) -> None:
    """Raises WeightMismatchError with `what` and the first few tensors that differ."""
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is not expected" for name in found if name not in expected]
    wrong += [
        f"{name} is {found[name]}, not {spec}"
        for name, spec in expected.items()
        if name in found and found[name] != spec
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise WeightMismatchError(f"{what}: {'; '.join(wrong[:3])}{more}")
